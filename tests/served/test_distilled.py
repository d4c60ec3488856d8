"""A draft that `outrider distill` made, behind the real services: it guesses well, and changes nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.client import DraftOptions, GenerationRequest, LocalStack, OutriderClient, Speculation, StackOptions
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.training.distill import DataOptions, distill
from outrider.training.options import DistillOptions, MethodKind
from outrider.training.synthesis import SynthesisOptions
from outrider.training.trainer import Progress
from tests.training.models import save_target, save_tokenizer

PROMPTS = ([1, 3, 9, 20, 2, 1, 4], [1, 3, 30, 31, 32, 2, 1, 4], [1, 3, 50, 2, 1, 4])


class Silent:
    """A reporter that nobody listens to."""

    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def training(self, progress: Progress) -> None:
        pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and the draft that was made for it."""
    target, output = save_target(tmp_path_factory.mktemp("target")), tmp_path_factory.mktemp("draft")
    save_tokenizer(Path(target))
    options = DistillOptions(
        target,
        output,
        MethodKind.LAYERS,
        num_steps=100,
        num_layers=1,
        draft_vocab_size=48,
        tokens_per_batch=1024,
        learning_rate=5e-3,
        held_out=0.15,
    )
    synthesis = SynthesisOptions(num_conversations=192, max_turn_len=8, max_answer_len=40, shard_size=64)
    distill(options, DataOptions(synthesis=synthesis), "", Silent())
    return target, str(output)


@pytest.fixture(scope="module")
async def client(folders: tuple[str, str]) -> AsyncIterator[OutriderClient]:
    target, draft = folders
    options = StackOptions(
        model=target,
        drafts=(DraftOptions(drafter="model", model=draft),),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false", "OUTRIDER_COMPILE": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "10"},
    )
    async with LocalStack(options) as stack, stack.client() as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_it_changes_nothing_and_guesses_well(
    client: OutriderClient, prompt: list[int], temperature: float
) -> None:
    parameters = SamplingParameters(temperature=temperature, seed=7, max_tokens=60, ignore_eos=True)
    plain = await client.complete(
        GenerationRequest(token_ids=prompt, parameters=parameters, speculation=Speculation(disabled=True))
    )
    drafted = await client.complete(GenerationRequest(token_ids=prompt, parameters=parameters))
    assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == 60
    assert drafted.statistics.acceptance_rate > 0.2


async def test_rejection_is_served_from_the_tokens_that_it_can_say(client: OutriderClient) -> None:
    parameters = SamplingParameters(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True)
    speculation = Speculation(acceptance_rule=AcceptanceRule.REJECTION)
    request = GenerationRequest(token_ids=PROMPTS[0], parameters=parameters, speculation=speculation)
    generation = await client.complete(request)
    assert len(generation.token_ids) == 60
    assert generation.statistics.num_draft_tokens > 20 and generation.statistics.acceptance_rate > 0.2
    assert (await client.complete(request)).token_ids == generation.token_ids
