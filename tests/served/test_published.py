"""Block heads of others behind the real services: they guess well, and change nothing."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.client import (
    DraftOptions,
    Generation,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule, SamplingParameters
from tests.lm.heads.published import SHAPE, DFlash, PEagle
from tests.served.known_distribution import check_distribution, read_target
from tests.served.stacks import until_all_in_rotation
from tests.training.models import save_target, save_tokenizer

# In `make exactness`. The default run has `tests/lm/heads/test_published.py`, and the drafter over such heads in
# `tests/drafters`.
pytestmark = pytest.mark.slow
V = 64
WHOLE = DraftVocabulary(torch.arange(V), V)
TARGET_SHAPE = SHAPE | {"hidden_size": 32}
PROMPTS = ([1, 3, 9, 20, 2, 1, 4], [1, 3, 30, 31, 32, 2, 1, 4], [1, 3, 50, 2, 1, 4])
TRAINED = {
    "dflash": lambda: DFlash(WHOLE, shape=TARGET_SHAPE, num_layers=1),
    "dspark": lambda: DFlash(WHOLE, shape=TARGET_SHAPE, from_anchor=True, block_size=4, markov="gated", sliding=16),
    "peagle": lambda: PEagle(WHOLE, shape=TARGET_SHAPE, block_size=4),
}
Case = tuple[float, int, AcceptanceRule]
CASES: tuple[Case, ...] = (
    (1.0, 3, AcceptanceRule.COUPLED),
    (0.0, 0, AcceptanceRule.COUPLED),
    (1.0, 10, AcceptanceRule.COUPLED),
    (1.0, 8, AcceptanceRule.REJECTION),
)
"""Temperature, nodes of a proposal, and rule."""
NUM_STEPS, NUM_TEXTS, TEXT_LEN = 300, 16, 48
MAX_TOKENS = 400
"""So many that drafts have opened a session before its text ends."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target."""
    folder = tmp_path_factory.mktemp("target")
    save_tokenizer(Path(save_target(folder)))
    return folder


def planted(folder: Path, output: Path) -> Path:
    """Write a DSpark head whose Markov head says what the target says after a token that begins the text."""
    model = read_target(folder)
    head = DFlash(WHOLE, shape=TARGET_SHAPE, from_anchor=True, block_size=4, markov="vanilla", rank=V)
    head.randomise(model.get_input_embeddings().weight)
    head.lm_head.weight.zero_()
    starts = torch.stack([torch.ones(V, dtype=torch.long), torch.arange(V)], dim=1)
    head.markov_head.markov_w1.weight.copy_(torch.eye(V))
    head.markov_head.markov_w2.weight.copy_(model(starts).logits[:, -1].float().T)
    head.save(output, head.config())
    return output


def trained(name: str, folder: Path, output: Path) -> Path:
    """Write a head that has learned from the target's own texts."""
    torch.manual_seed(1)
    model, head = read_target(folder), TRAINED[name]()
    head.randomise(model.get_input_embeddings().weight, scale=0.1)
    starts = torch.randint(5, V, (NUM_TEXTS, 2))
    texts = model.generate(starts, max_new_tokens=TEXT_LEN, min_new_tokens=TEXT_LEN, do_sample=True)  # type: ignore[operator]
    features = torch.cat(model(texts, output_hidden_states=True).hidden_states[1:4], dim=-1).float()
    optimiser = torch.optim.AdamW(head.requires_grad_(True).parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        loss = torch.zeros(())
        for place in range(step % 4, NUM_TEXTS, 4):
            anchor = int(torch.randint(2, texts.shape[1] - 5, ()))
            loss = loss + loss_of(head, features[place], texts[place], anchor)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    head.save(output, head.config())
    return output


def loss_of(head: DFlash | PEagle, features: Tensor, text: Tensor, anchor: int) -> Tensor:
    """Returns the cross entropy of a block behind the token at a position."""
    states = head.states(features[:anchor], text[: anchor + 1])
    wanted = text[anchor + 1 : anchor + 1 + len(states)]
    previous = text[anchor : anchor + len(states)]
    pairs = zip(states, previous.tolist(), strict=True)
    logits = torch.stack([head.lm_head(state) + head.added(state, token_id) for state, token_id in pairs])
    return functional.cross_entropy(logits, wanted)


def options(target: Path, folder: Path, place: str) -> StackOptions:
    return StackOptions(
        model=str(target),
        drafts=(DraftOptions(drafter="block", model=str(folder), at=place),),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false", "OUTRIDER_COMPILE": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "10", "OUTRIDER_NUM_SPECULATIVE_TOKENS": "3"},
    )


async def check_texts(client: OutriderClient, cases: Sequence[Case], least_rate: float, num_tokens: int) -> None:
    """Check that texts are the target's, with chains and trees, and that so many drafted tokens are accepted."""
    for _ in range(20):  # the first texts may end before a draft has opened their sessions
        if sum(one.statistics.num_draft_tokens for one in await together(client, Speculation(), 0.0, num_tokens)):
            break
    for temperature, max_nodes, rule in cases:
        drafted = await together(
            client, Speculation(acceptance_rule=rule, max_nodes=max_nodes), temperature, num_tokens
        )
        num_nodes = sum(generation.statistics.num_draft_tokens for generation in drafted)
        num_accepted = sum(generation.statistics.num_accepted_tokens for generation in drafted)
        assert num_accepted > least_rate * num_nodes > 0, (temperature, max_nodes, rule)
        if rule is AcceptanceRule.COUPLED:
            plain = await together(client, Speculation(disabled=True), temperature, num_tokens)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


async def together(
    client: OutriderClient, speculation: Speculation, temperature: float, num_tokens: int
) -> list[Generation]:
    parameters = SamplingParameters(temperature=temperature, seed=7, max_tokens=num_tokens, ignore_eos=True)
    asked = [GenerationRequest(token_ids=prompt, parameters=parameters, speculation=speculation) for prompt in PROMPTS]
    return await asyncio.gather(*map(client.complete, asked))


@pytest.mark.parametrize("place", ["service", "target"])
async def test_a_published_head_changes_nothing(target: Path, tmp_path: Path, place: str) -> None:
    folder = planted(target, tmp_path / "head")
    async with LocalStack(options(target, folder, place)) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        await check_texts(client, CASES[1:3], 0.1, 60)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["service", "target"])
@pytest.mark.parametrize("name", TRAINED)
async def test_trained_heads_change_nothing_and_follow_the_targets_distribution(
    target: Path, tmp_path: Path, name: str, place: str
) -> None:
    folder = trained(name, target, tmp_path / "head")
    async with LocalStack(options(target, folder, place)) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        # By chance it would be 0.02.
        await check_texts(client, CASES, 0.05, MAX_TOKENS)
        await check_distribution(client, target)
