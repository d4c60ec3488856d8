"""Attack 4: a pass that fails halfway leaves every session's KV cache as it was; no token changes."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.parameters import SamplingParameters
from outrider.tokens import Base, NodeKind, ProposalNode
from tests.lm.models import CONFIGS, save_model
from tests.target_service.conversation import Caller, target

SAMPLED = SamplingParameters(seed=3, max_tokens=16, ignore_eos=True)
COMMON = [3 + index % 50 for index in range(45)]
PROMPTS = {handle: [*COMMON, handle + 2] for handle in range(1, 5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(CONFIGS["llama"], tmp_path_factory.mktemp("model"))


async def speculated(caller: Caller, handle: int, prompt: Sequence[int], truth: Sequence[int]) -> list[int]:
    """Returns the output of a request whose proposals have right main lines, wrong ones, and right branches."""
    opened = await caller.open(handle, prompt, SAMPLED, num_speculative_tokens=4, stop_token_ids=())
    await caller.span(handle, opened.opened.cached_len, prompt[opened.opened.cached_len :])
    output: list[int] = []
    async for verdict in caller.verdicts(handle):
        output += verdict.token_ids
        wrong, right = [4, 5, 6], [*truth[len(output) : len(output) + 3], 7]
        nodes = [ProposalNode(depth, token_id, NodeKind.GUESSED) for depth, token_id in enumerate(wrong)]
        if right[0] != wrong[0]:
            parents = [0, *range(len(nodes) + 1, len(nodes) + len(right))]
            nodes += [ProposalNode(*item, NodeKind.GUESSED) for item in zip(parents, right, strict=True)]
        await caller.propose(handle, Base(len(prompt) + len(output), 1), nodes)
    await caller.send(handle, close={"committed_len": len(prompt) + len(output)})
    return output


def before_any_copy(model: Any) -> tuple[Any, str]:
    return model._storage, "prepare"


def after_all_was_written(model: Any) -> tuple[Any, str]:
    return model._features, "write"


@pytest.mark.slow
@pytest.mark.parametrize("place", [before_any_copy, after_all_was_written])
async def test_attack_04_what_a_failed_pass_wrote_changes_no_token(
    folder: str, place: Callable[[Any], tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with target(folder, adaptive_speculation=False, kv_budget_bytes=1 << 24) as (engine, caller):
        truth = {
            handle: await caller.plain(handle, prompt, SAMPLED, stop_token_ids=(), cache_salt=b"apart")
            for handle, prompt in PROMPTS.items()
        }
        forward, num_failed = engine._model.forward, 0
        part, name = place(engine._model)
        step = getattr(part, name)

        def fails(*arguments: Any) -> None:
            if name != "prepare":
                step(*arguments)
            raise RuntimeError("halfway")

        def sometimes(steps: Sequence[Any]) -> Any:
            nonlocal num_failed
            # Every pass over several sessions fails once; in halves it runs.
            if len(steps) < 2:
                return forward(steps)
            num_failed += 1
            with monkeypatch.context() as patch:
                patch.setattr(part, name, fails)
                return forward(steps)

        monkeypatch.setattr(engine._model, "forward", sometimes)
        outputs = await asyncio.gather(
            *(speculated(caller, 10 + number, prompt, truth[number]) for number, prompt in PROMPTS.items())
        )
        assert outputs == list(truth.values())
        assert num_failed > 5
        assert engine.load.speculation.num_accepted_tokens > 0
        async with asyncio.timeout(10):
            while engine.num_requests:
                await asyncio.sleep(0.005)
        assert engine._model.kv_usage.num_held == 0
