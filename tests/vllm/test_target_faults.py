"""Faults of docs/reliability.md on targets that run vLLM: stream and log are equal, no token is lost or doubled.

Texts are greedy, since no seed determines vLLM's noise. A penalty for frequent tokens keeps them from repeating
themselves, and goes on counting over every failover.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio

from outrider.client import GenerationRequest
from tests.faults import scene as scenes
from tests.faults.history import Record, check, read_log, watch
from tests.faults.scene import Scene, asking, plain
from tests.faults.stack import FaultOptions, FaultStack, fault_stack
from tests.faults.test_clients import (
    test_fault_35_cancel_and_deadline_free_the_kv_cache_on_both_workers,
    test_fault_37_overload,
)
from tests.faults.test_draft import test_fault_01_killed_mid_stream, test_fault_02_stopped
from tests.faults.test_orchestrator import (
    test_fault_16_killed_between_verdict_and_commit,
    test_fault_19_the_client_resumes_at_another_one_with_its_offset,
)
from tests.faults.test_target import (
    test_fault_11_killed_before_during_and_after_a_verification,
    test_fault_12_a_partitioned_owner_is_fenced_off_by_the_worker_too,
    test_fault_13_draining_during_a_rolling_update,
    test_fault_15_all_gone_then_resumable,
)
from tests.vllm.environment import ENVIRONMENT, PYTHON, needs_vllm, patched, save_tiny

pytestmark = [*needs_vllm, pytest.mark.timeout(600)]

__all__ = [
    "test_fault_01_killed_mid_stream",
    "test_fault_02_stopped",
    "test_fault_11_killed_before_during_and_after_a_verification",
    "test_fault_12_a_partitioned_owner_is_fenced_off_by_the_worker_too",
    "test_fault_13_draining_during_a_rolling_update",
    "test_fault_15_all_gone_then_resumable",
    "test_fault_16_killed_between_verdict_and_commit",
    "test_fault_19_the_client_resumes_at_another_one_with_its_offset",
    "test_fault_35_cancel_and_deadline_free_the_kv_cache_on_both_workers",
    "test_fault_37_overload",
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultStack]:
    model = save_tiny(tmp_path_factory.mktemp("model") / "tiny")
    options = FaultOptions(
        target=model, draft=model, target_environment=dict(ENVIRONMENT), target_interpreter=PYTHON, ready_s=240.0
    )
    with patched(scenes.SAMPLING, temperature=0.0, frequency_penalty=0.9):
        async with fault_stack(tmp_path_factory.mktemp("faults"), options) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="session")
async def scene(shared_stack: FaultStack, record_property: Callable[[str, object], None]) -> AsyncIterator[Scene]:
    """The stack, whole, with a client of its orchestrators."""
    async with shared_stack.client() as client:
        yield Scene(shared_stack, client, record_property)
    await shared_stack.heal()


async def test_a_rollout_of_both_targets_under_twenty_streams(scene: Scene) -> None:
    requests = [replace(asking(num_tokens=200), token_ids=(1, 2, number)) for number in range(3, 23)]
    await scene.learn(*requests)
    records: list[Record] = []

    async def roll() -> None:
        for process in scene.stack.targets:
            process.terminate()
            await process.wait_ended()
            assert process.exit_code == 0
            process.restart()
            await process.wait_ready(240)
            await scene.stack.healed()

    async def stream(request: GenerationRequest) -> None:
        while not rolling.done():
            # Under a new id each time: a repetition would be replayed from its log.
            records.append(await watch(scene.client, replace(request, request_id="", session_id=""), timeout_s=60))

    rolling = asyncio.create_task(roll())
    await asyncio.gather(rolling, *(stream(request) for request in requests))
    for record in records:
        assert record.error is None, f"{record.error!r} after {len(record.token_ids)} tokens of {record.session_id!r}"
        await read_log(scene.client, record)
    check(records, plain)
    num_replaced = sum(record.longest_gap_s > 0.5 for record in records)
    longest_s = max(record.longest_gap_s for record in records)
    print(f"{len(records)} streams; the longest gap was {longest_s:.2f} s, {num_replaced} had one above 0.5 s")
    assert len(records) >= 20
