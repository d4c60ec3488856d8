"""A draft that `outrider distill` made, behind the real services: it guesses well, and changes nothing."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from outrider.client import (
    Delta,
    DraftOptions,
    Generation,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.constraint import Constraint
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import TokenOrigin
from outrider.training.distill import DataOptions, distill
from outrider.training.options import DistillOptions, MethodKind
from outrider.training.synthesis import SynthesisOptions
from outrider.training.trainer import Progress
from tests.served.known_distribution import check_distribution
from tests.served.stacks import until_all_in_rotation
from tests.training.models import save_target, save_tokenizer

HIDDEN_SIZE = 32
MAX_TOKENS = 4000
NUM_ACCEPTED = 60
WINDOW = 64
"""Tokens that a target may run ahead of what is committed."""
HALF_OF_THE_WORDS = "(user|w[0-9]|w[13][0-9]){100,110}"
PROMPTS = ([1, 3, 9, 20, 2, 1, 4], [1, 3, 30, 31, 32, 2, 1, 4], [1, 3, 50, 2, 1, 4])


class Silent:
    """A reporter that nobody listens to."""

    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def training(self, progress: Progress) -> None:
        pass


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target."""
    folder = tmp_path_factory.mktemp("target")
    save_tokenizer(Path(save_target(folder)))
    # Constraints need a decoder; within one the words stand beside each other.
    spaced = {"type": "Replace", "pattern": {"Regex": "^"}, "content": " "}
    cut = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, spaced, {"type": "Fuse"}, cut]}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"decoder": decoder}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_TOKENS + 96}))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first distillation writes conversations that the others use."""
    return tmp_path_factory.mktemp("data") / "conversations"


# The method that ships in every run, the others in `make test-all`.
@pytest.fixture(
    scope="module",
    params=[
        MethodKind.BLOCK,
        pytest.param(MethodKind.EAGLE3, marks=pytest.mark.slow),
        pytest.param(MethodKind.LAYERS, marks=pytest.mark.slow),
        pytest.param(MethodKind.MEDUSA, marks=pytest.mark.slow),
    ],
    ids=lambda method: method.value,
)
def method(request: pytest.FixtureRequest) -> MethodKind:
    """How the draft is made."""
    return MethodKind(request.param)


@pytest.fixture(scope="module")
def folder(method: MethodKind, target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the draft."""
    output = tmp_path_factory.mktemp(method.value)
    options = DistillOptions(
        str(target),
        output,
        method,
        # Medusa heads, whose tests are slow ones, learn most slowly.
        num_steps=160 if method is MethodKind.MEDUSA else 60,
        num_layers=1,
        depth=3,
        draft_vocab_size=48,
        tokens_per_batch=1024,
        learning_rate=5e-3,
        held_out=0.15,
        trim=method in (MethodKind.EAGLE3, MethodKind.BLOCK),
    )
    synthesis = SynthesisOptions(num_conversations=96, max_turn_len=8, max_answer_len=40, shard_size=64)
    corpus = data if data.exists() else None
    distill(options, DataOptions(corpus=corpus, synthesis=synthesis), "", Silent())
    if corpus is None:
        shutil.copytree(output / "work" / "data", data)
    return output


DRAFTERS = {
    MethodKind.LAYERS: "model",
    MethodKind.EAGLE3: "eagle3",
    MethodKind.BLOCK: "block",
    MethodKind.MEDUSA: "medusa",
}
"""The drafter that runs what a method makes."""
NUM_FEATURES = {MethodKind.LAYERS: 0, MethodKind.EAGLE3: 3, MethodKind.BLOCK: 3, MethodKind.MEDUSA: 1}
"""Layers of the target that it is given features of."""


@pytest.fixture(scope="module")
async def client(method: MethodKind, target: Path, folder: Path) -> AsyncIterator[OutriderClient]:
    async with LocalStack(_options(method, target, folder, "service")) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        yield client


def _options(method: MethodKind, target: Path, folder: Path, place: str) -> StackOptions:
    return StackOptions(
        model=str(target),
        drafts=(DraftOptions(drafter=DRAFTERS[method], model=str(folder), at=place),),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false", "OUTRIDER_COMPILE": "false"},
        orchestrator_environment={
            "OUTRIDER_DRAFT_MAX_WAIT_S": "10",
            "OUTRIDER_NUM_SPECULATIVE_TOKENS": "3",
        },
    )


async def until_drafted(client: OutriderClient, request: GenerationRequest) -> Generation:
    """Returns a generation that was ended once drafts had given it tokens.

    The target is so quick that, beside other work, it has run far before the draft has opened the session.
    """
    generation, num_accepted = Generation(), 0
    async with aclosing(client.generate(request, timeout_s=60)) as events:
        async for event in events:
            generation.add(event)
            if isinstance(event, Delta) and num_accepted < NUM_ACCEPTED:
                num_accepted += event.origins.count(TokenOrigin.ACCEPTED)
                if num_accepted >= NUM_ACCEPTED:
                    await client.cancel(generation.session_id)
    assert num_accepted >= NUM_ACCEPTED
    return generation


@pytest.mark.parametrize("max_nodes", [0, 3, 10], ids=["default", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_they_change_nothing_and_guess_well(
    client: OutriderClient, method: MethodKind, temperature: float, max_nodes: int
) -> None:
    for prompt in PROMPTS:
        speculation = Speculation(drafter=DRAFTERS[method], max_nodes=max_nodes)
        drafted = await until_drafted(client, _asking(prompt, speculation, temperature=temperature))
        num_tokens = len(drafted.token_ids)
        plain = await client.complete(
            _asking(prompt, Speculation(disabled=True), temperature=temperature, max_tokens=num_tokens)
        )
        assert drafted.token_ids == plain.token_ids
        assert set(drafted.statistics.num_fallbacks) <= {"no_proposal"}
        # By chance it would be 0.02. Which part of the text is drafted, and so its rate, depends on the start.
        assert drafted.statistics.acceptance_rate > 0.1
        # Every position's features cross once, but for a few that a draft catches up with, and only for who is made of
        # them. When it is ended, the target may be a window ahead.
        width = NUM_FEATURES[method] * HIDDEN_SIZE * 2
        whole = (len(prompt) + num_tokens) * width
        assert whole / 2 <= drafted.statistics.feature_bytes <= 1.2 * whole + WINDOW * width


@pytest.mark.parametrize("max_nodes", [0, 10], ids=["default", "tree"])
async def test_they_change_nothing_within_a_constraint(
    client: OutriderClient, method: MethodKind, max_nodes: int
) -> None:
    num_accepted = 0
    for number, prompt in enumerate(PROMPTS):
        speculation = Speculation(drafter=DRAFTERS[method], max_nodes=max_nodes)
        num_accepted += await constrained(client, prompt, speculation, temperature=float(number % 2))
    assert num_accepted > 10


async def constrained(client: OutriderClient, prompt: list[int], speculation: Speculation, temperature: float) -> int:
    """Check that a constrained output is the same with drafts and without; return how many tokens were accepted."""
    parameters = SamplingParameters(
        temperature=temperature, seed=7, max_tokens=120, constraint=Constraint(regex=HALF_OF_THE_WORDS)
    )
    plain, drafted = [
        await client.complete(GenerationRequest(token_ids=prompt, parameters=parameters, speculation=given))
        for given in (Speculation(disabled=True), speculation)
    ]
    assert drafted.token_ids == plain.token_ids
    assert re.fullmatch(HALF_OF_THE_WORDS, drafted.text.replace(" ", ""))
    return drafted.statistics.num_accepted_tokens


@pytest.mark.parametrize("max_nodes", [0, 8])
async def test_rejection_is_served_from_the_tokens_that_they_can_say(
    client: OutriderClient, method: MethodKind, max_nodes: int
) -> None:
    speculation = Speculation(acceptance_rule=AcceptanceRule.REJECTION, drafter=DRAFTERS[method], max_nodes=max_nodes)
    request = _asking(PROMPTS[0], speculation, temperature=1.0)
    generation = await until_drafted(client, request)
    assert generation.statistics.acceptance_rate > 0.1
    assert (await client.complete(request)).token_ids == generation.token_ids


async def test_within_the_target_they_change_nothing_and_nothing_crosses_the_network(
    method: MethodKind, target: Path, folder: Path
) -> None:
    async with LocalStack(_options(method, target, folder, "target")) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        for temperature, max_nodes, rule in (
            (0.0, 0, AcceptanceRule.COUPLED),
            (1.0, 3, AcceptanceRule.COUPLED),
            (1.0, 10, AcceptanceRule.COUPLED),
            (1.0, 8, AcceptanceRule.REJECTION),
        ):
            speculation = Speculation(acceptance_rule=rule, max_nodes=max_nodes)
            asked = [_asking(prompt, speculation, temperature=temperature, max_tokens=40) for prompt in PROMPTS]
            drafted = await asyncio.gather(*map(client.complete, asked))
            again = await asyncio.gather(*map(client.complete, asked))
            assert [one.token_ids for one in again] == [one.token_ids for one in drafted]
            # Of all prompts together: of one, a Medusa head's 90 nodes may have 8 that are accepted.
            num_nodes = sum(generation.statistics.num_draft_tokens for generation in drafted)
            assert sum(generation.statistics.num_accepted_tokens for generation in drafted) > 0.1 * num_nodes > 0
            for prompt, generation in zip(PROMPTS, drafted, strict=True):
                assert generation.statistics.feature_bytes == 0
                if rule is AcceptanceRule.COUPLED:
                    plain = Speculation(disabled=True)
                    alone = _asking(prompt, plain, temperature=temperature, max_tokens=40)
                    assert (await client.complete(alone)).token_ids == generation.token_ids
        assert sum([await constrained(client, prompt, Speculation(), temperature=1.0) for prompt in PROMPTS]) > 10
        # A conversation goes on with the columns of its first turn.
        first = await client.complete(_asking(PROMPTS[0], Speculation(), max_tokens=30))
        second = await client.complete(_asking(PROMPTS[1], Speculation(), max_tokens=30, session_id=first.session_id))
        assert second.statistics.acceptance_rate > 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["service", "target"])
async def test_outputs_follow_the_targets_distribution(
    method: MethodKind, target: Path, folder: Path, place: str
) -> None:
    async with LocalStack(_options(method, target, folder, place)) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        await check_distribution(client, target)


async def test_a_conversation_goes_on_with_features_of_what_is_new(client: OutriderClient, method: MethodKind) -> None:
    drafting = Speculation(drafter=DRAFTERS[method])
    first = await until_drafted(client, _asking(PROMPTS[0], drafting))
    second = await client.complete(_asking(PROMPTS[1], drafting, max_tokens=30, session_id=first.session_id))
    # The head has the columns of the first turn, but for the last few.
    width = NUM_FEATURES[method] * HIDDEN_SIZE * 2
    assert second.statistics.feature_bytes <= (len(PROMPTS[1]) + 30 + 8) * width
    plain = Speculation(disabled=True)
    repeated = await client.complete(_asking(PROMPTS[0], plain, max_tokens=len(first.token_ids)))
    assert repeated.token_ids == first.token_ids
    continued = await client.complete(_asking(PROMPTS[1], plain, max_tokens=30, session_id=repeated.session_id))
    assert continued.token_ids == second.token_ids


def _asking(
    prompt: list[int],
    speculation: Speculation,
    *,
    temperature: float = 0.0,
    max_tokens: int = MAX_TOKENS,
    session_id: str = "",
) -> GenerationRequest:
    parameters = SamplingParameters(temperature=temperature, seed=7, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(token_ids=prompt, parameters=parameters, speculation=speculation, session_id=session_id)
