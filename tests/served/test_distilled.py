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
from tests.served.stacks import until_all_in_rotation
from tests.training.models import save_target, save_tokenizer

HIDDEN_SIZE = 32
NUM_TOKENS = 160
PROMPTS = ([1, 3, 9, 20, 2, 1, 4], [1, 3, 30, 31, 32, 2, 1, 4], [1, 3, 50, 2, 1, 4])


class Silent:
    """A reporter that nobody listens to."""

    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def training(self, progress: Progress) -> None:
        pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, and the drafts that were made for it."""
    target = save_target(tmp_path_factory.mktemp("target"))
    save_tokenizer(Path(target))
    found, corpus = {"target": target}, None
    for method in MethodKind:
        output = tmp_path_factory.mktemp(method.value)
        options = DistillOptions(
            target,
            output,
            method,
            num_steps=100,
            num_layers=1,
            depth=3,
            draft_vocab_size=48,
            tokens_per_batch=1024,
            learning_rate=5e-3,
            held_out=0.15,
            trim=method is MethodKind.EAGLE3,
        )
        synthesis = SynthesisOptions(num_conversations=192, max_turn_len=8, max_answer_len=40, shard_size=64)
        distill(options, DataOptions(corpus=corpus, synthesis=synthesis), "", Silent())
        corpus = corpus or output / "work" / "data"
        found[method.value] = str(output)
    return found


DRAFTERS = {"layers": "model", "eagle3": "eagle3", "medusa": "medusa"}
"""The drafter that runs what a method makes."""


@pytest.fixture(scope="module")
async def client(folders: dict[str, str]) -> AsyncIterator[OutriderClient]:
    options = StackOptions(
        model=folders["target"],
        drafts=tuple(DraftOptions(drafter=kind, model=folders[method]) for method, kind in DRAFTERS.items()),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false", "OUTRIDER_COMPILE": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "10", "OUTRIDER_NUM_SPECULATIVE_TOKENS": "3"},
    )
    async with LocalStack(options) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        yield client


@pytest.mark.parametrize("max_nodes", [0, 3, 10], ids=["default", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", DRAFTERS)
async def test_they_change_nothing_and_guess_well(
    client: OutriderClient, method: str, temperature: float, max_nodes: int
) -> None:
    for prompt in PROMPTS:
        # So many that the target, which is very fast, does not end before the draft has opened the session.
        parameters = SamplingParameters(temperature=temperature, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
        plain = await client.complete(
            GenerationRequest(token_ids=prompt, parameters=parameters, speculation=Speculation(disabled=True))
        )
        speculation = Speculation(drafter=DRAFTERS[method], max_nodes=max_nodes)
        drafted = await client.complete(
            GenerationRequest(token_ids=prompt, parameters=parameters, speculation=speculation)
        )
        assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == NUM_TOKENS
        assert set(drafted.statistics.num_fallbacks) <= {"no_proposal"}
        assert drafted.statistics.acceptance_rate > (0.1 if method == "medusa" else 0.2)
        # Every position's features cross once, but for a few that a draft catches up with, and only for who is made of
        # them.
        width = {"layers": 0, "eagle3": 3, "medusa": 1}[method] * HIDDEN_SIZE * 2
        whole = (len(prompt) + NUM_TOKENS) * width
        assert whole / 2 <= drafted.statistics.feature_bytes <= 1.2 * whole


@pytest.mark.parametrize("max_nodes", [0, 8])
@pytest.mark.parametrize("method", DRAFTERS)
async def test_rejection_is_served_from_the_tokens_that_they_can_say(
    client: OutriderClient, method: str, max_nodes: int
) -> None:
    parameters = SamplingParameters(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    speculation = Speculation(acceptance_rule=AcceptanceRule.REJECTION, drafter=DRAFTERS[method], max_nodes=max_nodes)
    request = GenerationRequest(token_ids=PROMPTS[0], parameters=parameters, speculation=speculation)
    generation = await client.complete(request)
    assert len(generation.token_ids) == NUM_TOKENS
    assert generation.statistics.num_draft_tokens > 20 and generation.statistics.acceptance_rate > 0.1
    assert (await client.complete(request)).token_ids == generation.token_ids


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
async def test_a_conversation_goes_on_with_features_of_what_is_new(client: OutriderClient, method: str) -> None:
    parameters = SamplingParameters(temperature=0.0, max_tokens=30, ignore_eos=True)
    texts = []
    for drafter in (DRAFTERS[method], ""):
        speculation = Speculation(drafter=drafter, disabled=not drafter)
        first = await client.complete(
            GenerationRequest(token_ids=PROMPTS[0], parameters=parameters, speculation=speculation)
        )
        second = await client.complete(
            GenerationRequest(
                token_ids=PROMPTS[1],
                parameters=parameters,
                speculation=speculation,
                session_id=first.session_id,
            )
        )
        texts.append((first.token_ids, second.token_ids))
        if drafter == "eagle3":
            # The head has the columns of the first turn, but for the last few.
            assert second.statistics.feature_bytes < (len(PROMPTS[1]) + 30 + 8) * 3 * HIDDEN_SIZE * 2
    assert texts[0] == texts[1]
