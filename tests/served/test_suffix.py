"""The suffix drafter through the whole stack: it learns from a tenant's sessions, for that tenant alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.client import (
    DraftOptions,
    Generation,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.parameters import SamplingParameters

# `make exactness` runs them; whose texts are used is tested without a stack in tests/drafters/test_suffix.py.
pytestmark = pytest.mark.slow

TOKENS = {"one": "a-token-of-one", "other": "a-token-of-another"}
NUM_TOKENS = 100


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """A target whose texts repeat little in themselves, and a draft that it always waits for, once it takes part.

    Passes take 10 ms, so that on a busy machine few of them come before the draft does.
    """
    tenants: Path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    tenants.write_text(json.dumps({name: {"tokens": [token]} for name, token in TOKENS.items()}))
    options = StackOptions(
        model="markov:vocabulary=512,order=2,seed=5,step_s=0.01",
        drafts=(DraftOptions("suffix"),),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "10", "OUTRIDER_TENANTS_FILE": str(tenants)},
    )
    async with LocalStack(options) as running:
        async with OutriderClient(running.addresses, token=TOKENS["one"]) as client, asyncio.timeout(30):
            while not all(worker.in_rotation for worker in (await client.list_models()).workers):
                await asyncio.sleep(0.05)
        yield running


async def _told(
    stack: LocalStack, tenant: str, seed: int, *, speculates: bool = True, prediction: Sequence[int] | None = None
) -> Generation:
    """Returns the text of a seed, told to a tenant."""
    request = GenerationRequest(
        token_ids=(1, 2, 3),
        parameters=SamplingParameters(seed=seed, max_tokens=NUM_TOKENS),
        speculation=Speculation(disabled=not speculates, lookahead=0),
        prediction=prediction,
    )
    async with OutriderClient(stack.addresses, token=TOKENS[tenant]) as client:
        return await client.complete(request, timeout_s=60)


async def test_a_tenants_text_speeds_up_that_tenants_text_only(stack: LocalStack) -> None:
    plain = await _told(stack, "one", 9, speculates=False)
    first, again, other = await _told(stack, "one", 9), await _told(stack, "one", 9), await _told(stack, "other", 9)
    for generation in (first, again, other):
        assert generation.token_ids == plain.token_ids
    assert first.statistics.num_accepted_tokens < NUM_TOKENS * 0.1
    assert again.statistics.num_accepted_tokens > NUM_TOKENS * 0.7
    assert other.statistics.num_accepted_tokens == first.statistics.num_accepted_tokens


async def test_a_prediction_is_taken_over_as_far_as_it_is_right(stack: LocalStack) -> None:
    plain = await _told(stack, "one", 11, speculates=False)
    changed = [*plain.token_ids[:40], 0, 0, *plain.token_ids[42:80]]
    predicted = await _told(stack, "one", 11, prediction=changed)
    assert predicted.token_ids == plain.token_ids
    assert predicted.statistics.num_prediction_tokens == 80
    # After a difference three tokens tell where it goes on.
    assert predicted.statistics.num_accepted_prediction_tokens == 75
    assert predicted.statistics.num_accepted_tokens > 60
    nothing = await _told(stack, "other", 11, prediction=[])
    assert (nothing.token_ids, nothing.statistics.num_prediction_tokens) == (plain.token_ids, 0)
    assert nothing.statistics.num_accepted_tokens < NUM_TOKENS * 0.1


async def test_a_deleted_session_speeds_up_nothing(stack: LocalStack) -> None:
    first = await _told(stack, "one", 10)
    async with OutriderClient(stack.addresses, token=TOKENS["one"]) as client:
        await client.delete_session(first.session_id)
    again = await _told(stack, "one", 10)
    assert again.statistics.num_accepted_tokens == first.statistics.num_accepted_tokens
    assert (await _told(stack, "one", 10)).statistics.num_accepted_tokens > NUM_TOKENS * 0.7
