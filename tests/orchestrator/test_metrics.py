"""How requests that do not end well are counted, too."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from orchestrator.metrics import OrchestratorMetrics, RequestStatistics
from outrider.errors import InvalidArgument, Unavailable
from outrider.parameters import AcceptanceRule
from outrider.v1 import target_pb2
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget
from tests.orchestrator.stage import Orchestrator, asking, orchestrating


def told(orchestrator: Orchestrator, name: str, **labels: str) -> float:
    return orchestrator.registry.get_sample_value(f"outrider_{name}", labels) or 0.0


async def until(orchestrator: Orchestrator, name: str, value: float, **labels: str) -> None:
    async with asyncio.timeout(10):
        while told(orchestrator, name, **labels) != value:
            await asyncio.sleep(0.01)


async def test_outcomes(session_store_url: str, target: ScriptedTarget) -> None:
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        await orchestrator.events(asking())
        await until(orchestrator, "requests_total", 1, outcome="length")
        with pytest.raises(InvalidArgument):
            await orchestrator.events(asking(temperature=-1.0))
        await until(orchestrator, "requests_total", 1, outcome="INVALID_ARGUMENT")
        target.run_len = 3
        call = orchestrator.stub.Generate(asking())
        async for event in call:
            if event.HasField("delta"):
                break
        assert told(orchestrator, "num_requests_running") == 1
        call.cancel()
        await until(orchestrator, "requests_total", 1, outcome="client_gone")
        await until(orchestrator, "num_requests_running", 0)


async def test_a_resumed_request_counts_its_tokens_once(session_store_url: str, target: ScriptedTarget) -> None:
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        target.run_len = 8
        call = orchestrator.stub.Generate(asking(request_id="r", session_id="metered"))
        num = 0
        async for event in call:
            num += len(event.delta.token_ids)
            if num == 8:
                break
        call.cancel()
        await until(orchestrator, "requests_total", 1, outcome="client_gone")
        target.allow(None)
        await orchestrator.events(asking(request_id="r", session_id="metered", resume_offset=5))
        await until(orchestrator, "requests_total", 1, outcome="length")
        assert told(orchestrator, "resumes_total") == 1
        assert told(orchestrator, "generation_tokens_total") == 20
        assert told(orchestrator, "prompt_tokens_total") == 3
        # A repetition of what has ended counts as a request, and for nothing else.
        await orchestrator.events(asking(request_id="r", session_id="metered"))
        await until(orchestrator, "requests_total", 2, outcome="length")
        assert told(orchestrator, "generation_tokens_total") == 20
        assert told(orchestrator, "prompt_tokens_total") == 3


async def test_fallbacks_and_changes_of_target(session_store_url: str, draft: ScriptedDraft) -> None:
    async with (
        ScriptedTarget("t0") as one,
        ScriptedTarget("t1") as other,
        orchestrating(session_store_url, (one, other), (draft,)) as orchestrator,
    ):
        other.load.num_active_sessions = 9
        one.run_len = 5
        async with asyncio.timeout(20):
            while not all(link.is_up for link in orchestrator.replicas.targets):
                await asyncio.sleep(0.01)
        running = asyncio.create_task(orchestrator.events(asking(plain=True)))
        await one.saw("span")
        await one.die()
        await running
        assert told(orchestrator, "target_changes_total", reason="UNAVAILABLE") == 1
        await draft.die()
        await orchestrator.until_drafts(0)
        await orchestrator.events(asking())
        assert told(orchestrator, "fallbacks_total", reason="no_draft") >= 1
        await until(orchestrator, "workers", 1, role="draft", in_rotation="false")


NAME = "outrider_spec_decode_num_accepted_tokens_by_drafter_total"


def test_accepted_tokens_of_the_output_count_for_their_drafters() -> None:
    registry = CollectorRegistry()
    statistics = RequestStatistics(OrchestratorMetrics(registry), AcceptanceRule.COUPLED)
    names = ["eagle3", "eagle3+suffix", "", "suffix", ""]
    verdict = target_pb2.Verdict(drafters=names, num_draft_tokens=6, num_accepted_tokens=4)
    statistics.record_verdict(verdict, 5)
    # A stop string left two tokens, one with a name each; a target's own token counts for nobody.
    statistics.record_verdict(verdict, 2)
    statistics.record_verdict(target_pb2.Verdict(drafters=["", "suffix"], num_draft_tokens=2, num_accepted_tokens=1), 2)
    statistics.record_verdict(target_pb2.Verdict(num_draft_tokens=3, num_accepted_tokens=3), 4)
    message = statistics.message()
    expected = {"eagle3": 2, "eagle3+suffix": 2, "suffix": 1}
    assert message.num_accepted_tokens_by_drafter == expected
    assert message.num_accepted_tokens == 10
    assert {name: registry.get_sample_value(NAME, {"drafter": name}) for name in expected} == expected
    assert registry.get_sample_value(NAME, {"drafter": ""}) is None


async def test_no_target_is_an_outcome(session_store_url: str) -> None:
    async with orchestrating(session_store_url, (), failover_timeout_s=0.2) as orchestrator:
        with pytest.raises(Unavailable):
            await orchestrator.events(asking())
        await until(orchestrator, "requests_total", 1, outcome="UNAVAILABLE")
        assert told(orchestrator, "commit_seconds_count") == 0


async def test_the_kv_cache_of_all_targets_in_rotation(session_store_url: str) -> None:
    async with ScriptedTarget("t0") as one, ScriptedTarget("t1") as other:
        for target, budget, used in ((one, 3000, 1500), (other, 1000, 100)):
            target.info.kv_budget_bytes = budget
            target.load.kv_used_bytes = used
        async with orchestrating(session_store_url, (one, other)) as orchestrator:
            await until(orchestrator, "targets_kv_cache_usage_ratio", 0.4)
            await one.die()
            await until(orchestrator, "targets_kv_cache_usage_ratio", 0.1)
            await other.die()
            await until(orchestrator, "targets_kv_cache_usage_ratio", 1.0)


async def test_targets_without_a_budget_count_as_empty(session_store_url: str, target: ScriptedTarget) -> None:
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        target.load.kv_used_bytes = 100
        await orchestrator.events(asking())
        assert told(orchestrator, "targets_kv_cache_usage_ratio") == 0
