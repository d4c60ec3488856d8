"""What a stream tells of its workers, where the request asks for a report."""

from outrider import AsyncClient, Delta, GenerationRequest, Notice, NoticeKind, SamplingParameters, Speculation
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, orchestrating


async def test_a_stream_tells_of_lost_workers_where_asked(session_store_url: str, draft: ScriptedDraft) -> None:
    parameters = SamplingParameters(max_tokens=40)
    async with ScriptedTarget("a") as one, ScriptedTarget("b") as other:
        for target in (one, other):
            target.run_len = 10
        async with (
            orchestrating(session_store_url, (one, other), (draft,)) as running,
            AsyncClient(running.address) as client,
        ):
            request = GenerationRequest(token_ids=PROMPT, parameters=parameters, speculation=Speculation(report=True))
            notices: list[Notice] = []
            deltas: list[Delta] = []
            async for event in client.generate(request, timeout_s=20):
                if isinstance(event, Notice):
                    notices.append(event)
                if isinstance(event, Delta):
                    deltas.append(event)
                    if len(deltas) == 1:
                        used, unused = (one, other) if one.opened else (other, one)
                        await draft.die()
                        await used.die()
                        unused.allow(None)
            kinds = [notice.kind for notice in notices]
            assert NoticeKind.DRAFT_LOST in kinds
            assert NoticeKind.TARGET_REPLACED in kinds
            assert all(notice.reason == "UNAVAILABLE" for notice in notices)
            assert [token for delta in deltas for token in delta.token_ids] == continuation(PROMPT, 40)
            counts = [delta.statistics.num_target_passes for delta in deltas if delta.statistics]
            assert len(counts) == len(deltas)
            assert counts == sorted(counts)
            # Who does not ask gets the events that there always were.
            plain = GenerationRequest(token_ids=PROMPT, parameters=parameters)
            async for event in client.generate(plain, timeout_s=20):
                assert not isinstance(event, Notice)
                assert not isinstance(event, Delta) or event.statistics is None
