"""What the three services tell Prometheus is what happened."""

import asyncio

from outrider.client import GenerationRequest, LocalStack, OutriderClient, Speculation
from outrider.parameters import SamplingParameters
from tests.serving.test_metrics import read

NUM_REQUESTS = 6
NUM_TOKENS = 300
"""More than the window, so that the target cannot be done before the draft has proposed."""
RUNNING = {
    "target_service": "outrider_target_sessions_running",
    "draft_service": "outrider_draft_sessions_running",
    "orchestrator": "outrider_requests_open",
}


async def until_idle(stack: LocalStack) -> dict[str, dict[str, float]]:
    """Returns each service's metrics, once nothing runs any more: a client is told before the workers are."""
    processes = (stack.targets[0], stack.drafts[0], stack.orchestrators[0])
    async with asyncio.timeout(20):
        while True:
            found = {item.spec.module: await asyncio.to_thread(read, item.metrics_address) for item in processes}
            running = [found[service][name] for service, name in RUNNING.items()]
            if not any(running):
                return found
            await asyncio.sleep(0.05)


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns what was counted in between, and gauges as they are now."""
    counted = ("_total", "_count", "_sum")
    return {
        name: value - before.get(name, 0.0) if name.partition(",")[0].endswith(counted) else value
        for name, value in after.items()
    }


async def test_metrics_add_up_to_what_clients_were_told(shared_stack: LocalStack, client: OutriderClient) -> None:
    before = await until_idle(shared_stack)
    requests = [
        GenerationRequest(
            token_ids=(1, 2, 3),
            parameters=SamplingParameters(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True),
            speculation=Speculation(disabled=seed == 0),
        )
        for seed in range(NUM_REQUESTS)
    ]
    results = await asyncio.gather(*(client.complete(request) for request in requests))
    found = {service: since(before[service], after) for service, after in (await until_idle(shared_stack)).items()}
    statistics = [result.statistics for result in results]
    target, draft, orchestrator = found["target_service"], found["draft_service"], found["orchestrator"]

    assert orchestrator["outrider_requests_total,outcome=length"] == NUM_REQUESTS
    assert orchestrator["outrider_generation_tokens_total"] == NUM_REQUESTS * NUM_TOKENS
    assert orchestrator["outrider_prompt_tokens_total"] == NUM_REQUESTS * 3
    assert orchestrator["outrider_num_requests_running"] == orchestrator["outrider_num_requests_waiting"] == 0
    assert orchestrator["outrider_time_to_first_token_seconds_count"] == NUM_REQUESTS
    assert orchestrator["outrider_e2e_request_latency_seconds_count"] == NUM_REQUESTS
    assert orchestrator["outrider_e2e_request_latency_seconds_sum"] > 0
    assert orchestrator["outrider_commit_seconds_count"] > 0
    assert orchestrator["outrider_workers,in_rotation=true,role=target"] == 1
    assert orchestrator["outrider_workers,in_rotation=false,role=draft"] == 1, "the one with another tokenizer"

    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_hits"):
        told = sum(getattr(item, name) for item in statistics)
        assert target[f"outrider_spec_decode_{name}_total"] == told, name
    per_position = [
        value for name, value in target.items() if name.startswith("outrider_spec_decode_num_accepted_tokens_per_pos")
    ]
    assert sum(per_position) == sum(item.num_accepted_tokens for item in statistics) > 0
    assert target["outrider_target_rounds_total"] == sum(item.num_target_passes for item in statistics)
    assert target["outrider_target_pass_seconds_count"] > 0
    assert target["outrider_target_queued_tokens"] == target["outrider_target_sessions_waiting"] == 0
    assert target["outrider_target_round_seconds_total,cause=model"] > 0
    assert target["outrider_target_sessions_running"] == 0
    assert target["outrider_target_waits_total,outcome=answered"] > 0
    assert target["outrider_target_waits_total,outcome=expired"] >= 0

    assert draft["outrider_draft_steps_total"] > 0
    assert draft["outrider_draft_busy_seconds_total"] > 0
    assert draft["outrider_draft_nodes_total"] >= target["outrider_spec_decode_num_proposed_nodes_total"] > 0
    assert draft["outrider_draft_proposals_total"] >= target["outrider_spec_decode_num_drafts_total"]
    assert 0 <= draft["outrider_draft_late_proposals_total"] <= draft["outrider_draft_proposals_total"]
