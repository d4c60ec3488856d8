"""Features on the draft's stream: given before the tokens they belong to, asked for where they are missing."""

import torch

from outrider.parameters import SamplingParameters
from outrider.v1 import draft_pb2, tokens_pb2, worker_pb2
from tests.draft_service.conftest import DraftClient, advance_frame, close_frame, running_draft
from tests.drafters.heads import VOCABULARY, TinyEagle3, V

TEXT = [3 + 7 * index % (V - 3) for index in range(40)]
GREEDY = SamplingParameters(temperature=0.0, max_tokens=1000)


def features_frame(handle: int, tiny: TinyEagle3, start: int, end: int) -> draft_pb2.DraftRequestFrame:
    span = tiny.span(start, end)
    data = span.rows.contiguous().view(torch.uint8).numpy().tobytes()
    return draft_pb2.DraftRequestFrame(handle=handle, features=tokens_pb2.Features(start=span.start, data=data))


def wanted(tiny: TinyEagle3, length: int, num: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    for _ in range(num):
        path = (*path, int(VOCABULARY.token_ids[tiny.logits(tuple(TEXT[:length]), path).argmax()]))
    return path


async def opened(client: DraftClient, session_id: str = "s", **more: object) -> tuple[int, draft_pb2.DraftOpened]:
    handle, frame = await client.open(session_id, parameters=GREEDY, **more)
    assert frame.WhichOneof("frame") == "opened", frame
    return handle, frame.opened


async def test_a_proposal_follows_features_and_tokens_in_either_order() -> None:
    tiny = TinyEagle3.make()
    async with running_draft(tiny.drafter()) as draft:
        client = draft.stream()
        handle, answer = await opened(client)
        assert answer.features_len == 0
        await client.send(features_frame(handle, tiny, 0, 11))
        assert await client.drafted(handle, TEXT[:12], num=3) == wanted(tiny, 12, 3)
        await client.send(advance_frame(handle, TEXT[12:15], 12, num=3))
        missing = (await client.receive(handle)).features_missing
        assert (missing.start, missing.num_frames) == (11, 1)
        await client.send(features_frame(handle, tiny, 11, 14))
        assert tuple(node.token_id for node in await client.proposal(handle)) == wanted(tiny, 15, 3)


async def test_what_comes_in_parts_is_asked_for_once_and_a_gap_again() -> None:
    tiny = TinyEagle3.make()
    async with running_draft(tiny.drafter()) as draft:
        client = draft.stream()
        handle, _ = await opened(client)
        await client.send(advance_frame(handle, TEXT[:20], num=2))
        assert (await client.receive(handle)).features_missing.start == 0
        await client.send(features_frame(handle, tiny, 0, 5))
        await client.send(features_frame(handle, tiny, 5, 9))
        await client.send(features_frame(handle, tiny, 12, 19))  # what is between was lost on the way
        missing = (await client.receive(handle)).features_missing
        assert (missing.start, missing.num_frames) == (9, 3)
        await client.send(features_frame(handle, tiny, 9, 19))
        assert tuple(node.token_id for node in await client.proposal(handle)) == wanted(tiny, 20, 2)


async def test_a_session_opened_again_needs_only_what_is_new() -> None:
    tiny = TinyEagle3.make()
    async with running_draft(tiny.drafter()) as draft:
        client = draft.stream()
        handle, _ = await opened(client)
        await client.send(features_frame(handle, tiny, 0, 11))
        await client.drafted(handle, TEXT[:12], num=3)
        await client.send(close_frame(handle))
        handle, answer = await opened(client, fencing_token=2)
        assert answer.features_len == 11
        await client.send(features_frame(handle, tiny, 11, 13))
        assert await client.drafted(handle, TEXT[12:14], 12, num=3, fencing_token=2) == wanted(tiny, 14, 3)


async def test_other_sessions_draft_while_one_waits() -> None:
    tiny = TinyEagle3.make()
    async with running_draft(tiny.drafter()) as draft:
        client = draft.stream()
        one, _ = await opened(client, "one")
        other, _ = await opened(client, "other")
        await client.send(advance_frame(one, TEXT[:12], num=2))
        assert (await client.receive(one)).features_missing.start == 0
        await client.send(features_frame(other, tiny, 0, 7))
        assert await client.drafted(other, TEXT[:8], num=2) == wanted(tiny, 8, 2)
        await client.send(features_frame(one, tiny, 0, 11))
        assert tuple(node.token_id for node in await client.proposal(one)) == wanted(tiny, 12, 2)


async def test_a_wrong_length_is_refused_and_late_features_are_ignored() -> None:
    tiny = TinyEagle3.make()
    async with running_draft(tiny.drafter()) as draft:
        client = draft.stream()
        handle, _ = await opened(client)
        bad = tokens_pb2.Features(start=0, data=b"1234567")
        await client.send(draft_pb2.DraftRequestFrame(handle=handle, features=bad))
        refusal = await client.refusal(handle)
        assert refusal.reason == "INVALID_ARGUMENT" and refusal.metadata["field"] == "features.data"
        await client.send(close_frame(handle), features_frame(handle, tiny, 0, 3))
        handle, _ = await opened(client, "another")
        assert (await draft.worker.GetLoad(worker_pb2.GetLoadRequest())).num_stale_messages == 1


async def test_it_says_what_it_is_made_of_and_for_whom() -> None:
    tiny = TinyEagle3.make()
    drafter = tiny.drafter(target="of-target")
    async with running_draft(drafter) as draft:
        info = await draft.worker.GetInfo(worker_pb2.GetInfoRequest())
        assert (list(info.feature_layers), info.hidden_size) == ([0, 1, 2], 16)
        assert info.target_fingerprint == "of-target"
        client = draft.stream()
        _, frame = await client.open(target_fingerprint="another")
        assert frame.refusal.reason == "MODEL_MISMATCH"
        assert "of-target" in frame.refusal.message and "another" in frame.refusal.message
        _, frame = await client.open(target_fingerprint="of-target")
        assert frame.WhichOneof("frame") == "opened"


async def test_a_tree_is_as_large_as_is_asked_for() -> None:
    tiny = TinyEagle3.make()
    torch.manual_seed(0)
    async with running_draft(tiny.drafter()) as draft:
        client = draft.stream()
        handle, _ = await opened(client)
        await client.send(features_frame(handle, tiny, 0, 11))
        for max_nodes, most in ((0, 3), (3, 3), (10, 10), (30, 30)):
            frame = advance_frame(handle, TEXT[11:12] if max_nodes else TEXT[:12], 11 if max_nodes else 0, num=3)
            frame.advance.max_nodes = max_nodes
            await client.send(frame)
            nodes = await client.proposal(handle)
            assert len(nodes) == most
            assert (len({node.parent for node in nodes}) == len(nodes)) == (most == 3)
