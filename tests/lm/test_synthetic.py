"""Synthetic pairs: their distributions follow the options, and the base model's passes are run."""

from pathlib import Path

import pytest
import torch

from outrider.errors import InvalidArgument
from outrider.lm.loading import load_model
from outrider.lm.model import SessionStep
from outrider.lm.synthetic import NEXT_CHOICES, SyntheticDistributions, SyntheticModel, SyntheticOptions
from outrider.parameters import SamplingParameters
from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.speculation.sampling import SamplingMetadata, TokenHistory, target_distribution
from outrider.speculation.verification import draft_coupled
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan
from tests.lm.models import CONFIGS, save_model
from tests.proposals import chain

_VOCABULARY = 300
_NUM_CONTEXTS = 4000
_TOLERANCE = 0.03


def _distribution(scores: dict[int, float], parameters: SamplingParameters) -> torch.Tensor:
    logits = torch.full((_VOCABULARY,), -40.0)
    logits[list(scores)] = torch.tensor(list(scores.values()))
    return target_distribution(logits, SamplingMetadata(parameters, TokenHistory((), (), parameters), ()))


def _ranked(distribution: torch.Tensor, position: int, source: KeyedSource) -> list[int]:
    """Return the first five choices of a draft with the target's noise."""
    noise = source.exponential(torch.arange(_VOCABULARY), Counter(Purpose.TARGET, position))
    return [int(token_id) for token_id in (distribution / noise).topk(5).indices]


@pytest.mark.parametrize(("acceptance", "temperature"), [(0.6, 0.0), (0.8, 1.0), (0.9, 0.0)])
def test_frequencies_are_those_of_the_options(acceptance: float, temperature: float) -> None:
    distribution = SyntheticDistributions(SyntheticOptions(acceptance=acceptance, seed=5), _VOCABULARY, (2,))
    parameters = SamplingParameters(temperature=temperature)
    source = KeyedSource(11)
    ranks = []
    for position in range(_NUM_CONTEXTS):
        context = (position % 7, position)
        target = _distribution(distribution.target(context), parameters)
        draft = _distribution(distribution.draft(context), parameters)
        token_id = draft_coupled(target, position, source)
        ranked = _ranked(draft, position, source)
        # Greedy distributions have one token, so that the next choices are those of the logits.
        if temperature == 0:
            ranked = sorted(distribution.draft(context), key=lambda item: -distribution.draft(context)[item])[:5]
            assert ranked[0] == draft_coupled(draft, position, source)
        ranks.append(ranked.index(token_id) if token_id in ranked else 99)
    misses = [rank for rank in ranks if rank]
    assert 1 - len(misses) / _NUM_CONTEXTS == pytest.approx(acceptance, abs=_TOLERANCE)
    for num, frequency in NEXT_CHOICES.items():
        share = sum(rank <= num for rank in misses) / len(misses)
        assert share == pytest.approx(frequency, abs=3.5 * (0.25 / len(misses)) ** 0.5)


def test_rejection_accepts_as_often() -> None:
    distribution = SyntheticDistributions(SyntheticOptions(acceptance=0.8), _VOCABULARY)
    parameters = SamplingParameters()
    overlaps = [
        torch.minimum(
            _distribution(distribution.target((number,)), parameters),
            _distribution(distribution.draft((number,)), parameters),
        ).sum()
        for number in range(_NUM_CONTEXTS)
    ]
    assert float(torch.stack(overlaps).mean()) == pytest.approx(0.8, abs=_TOLERANCE)


def test_forbidden_tokens_have_no_probability_and_change_few_contexts() -> None:
    options = SyntheticOptions(seed=3)
    free, forbidding = SyntheticDistributions(options, 64), SyntheticDistributions(options, 64, (2, 3))
    distributions = [(free.target((number,)), forbidding.target((number,))) for number in range(1000)]
    assert not any({2, 3} & distribution.keys() for _, distribution in distributions)
    assert sum(one == other for one, other in distributions) > 800


def test_a_name_gives_its_options_again() -> None:
    options = SyntheticOptions.from_name("synthetic:base=markov:vocabulary=64;seed=3,acceptance=0.6,role=draft,seed=7")
    assert options == SyntheticOptions("markov:vocabulary=64,seed=3", "draft", 0.6, 7)
    assert SyntheticOptions.from_name(options.name) == options


@pytest.mark.parametrize(
    "name", ["synthetic:role=judge", "synthetic:what=1", "synthetic:acceptance=2", "synthetic:base=markov:vocabulary=8"]
)
def test_wrong_options_are_named(name: str) -> None:
    with pytest.raises(InvalidArgument, match="model"):
        load_model(name)


def test_the_former_prefix_is_rejected_with_the_new_name() -> None:
    with pytest.raises(InvalidArgument, match="'synthetic:role=draft,seed=3'"):
        load_model("planted:role=draft,seed=3")


def test_it_answers_by_the_last_tokens_whatever_was_dropped_or_kept(tmp_path: Path) -> None:
    folder = save_model(CONFIGS["llama"], tmp_path)
    loaded = load_model(f"synthetic:base={folder},order=3")
    model = loaded.model
    assert isinstance(model, SyntheticModel)
    assert model.info.tokenizer_fingerprint == load_model(folder).model.info.tokenizer_fingerprint
    cache = model.new_cache()
    tree = ProposalTree()
    for parent, token_id in ((0, 9), (1, 10), (0, 11)):
        tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    logits = model.forward([SessionStep(cache, TokenSpan(0, (4, 5, 6)), tree)])[0]
    contexts = [(4, 5, 6), (5, 6, 9), (6, 9, 10), (5, 6, 11)]
    for row, context in zip(logits, contexts, strict=True):
        assert _above_floor(row) == model.distributions.target(context)
        assert row[2] == -torch.inf
    cache.keep((3,))
    assert (cache.cached_len, cache.inner.cached_len) == (4, 4)
    cache.truncate(2)
    again = model.forward([SessionStep(cache, TokenSpan(2, (7,)), chain((8,)))])[0]
    assert _above_floor(again[1]) == model.distributions.target((5, 7, 8))


def test_sessions_that_begin_as_a_text_go_on_as_it_does(tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text("[[5, 6, 5, 7], [9, 6, 5, 8]]")
    model = load_model(f"synthetic:base=markov:vocabulary=64,order=1,texts={texts}").model
    assert isinstance(model, SyntheticModel)
    logits = model.forward([SessionStep(model.new_cache(), TokenSpan(0, (5,)), chain((6, 5, 7)))])[0]
    assert [_above_floor(row) for row in logits[:3]] == [{6: 0.0}, {5: 0.0}, {7: 0.0}]
    # Behind its end, and beside it, a session is as any other.
    free = load_model("synthetic:base=markov:vocabulary=64,order=1").model
    assert isinstance(free, SyntheticModel)
    assert _above_floor(logits[3]) == free.distributions.target((7,))
    assert model.distributions.target((9, 6, 5)) == {8: 0.0}
    assert model.distributions.target((6, 5)) == free.distributions.target((5,))


@pytest.mark.parametrize("content", [None, "{", "[[-1]]", '[["a"]]', "[1]"])
def test_texts_that_cannot_be_read_are_named(tmp_path: Path, content: str | None) -> None:
    texts = tmp_path / "texts.json"
    if content is not None:
        texts.write_text(content)
    with pytest.raises(InvalidArgument, match=r"texts.json"):
        load_model(f"synthetic:base=markov:vocabulary=64,texts={texts}")


def test_it_follows_what_a_cache_adopts(tmp_path: Path) -> None:
    model = load_model("synthetic:base=markov:vocabulary=64,order=3").model
    tokens = tuple(range(3, 43))
    first, second = model.new_cache(), model.new_cache()
    model.forward([SessionStep(first, TokenSpan(0, tokens), wants_logits=False)])
    start = second.adopt(tokens)
    assert start > 0
    logits = model.forward([SessionStep(second, TokenSpan(start, tokens[start : start + 1]))])[0]
    assert isinstance(model, SyntheticModel)
    assert _above_floor(logits[0]) == model.distributions.target(tokens[: start + 1])


def test_a_pair_differs_in_nothing_but_the_model_fingerprint() -> None:
    base = "synthetic:base=markov:vocabulary=64,seed=3,role="
    target, draft = load_model(f"{base}target").model.info, load_model(f"{base}draft").model.info
    assert target.tokenizer_fingerprint == draft.tokenizer_fingerprint
    assert target.fingerprint != draft.fingerprint


def _above_floor(row: torch.Tensor) -> dict[int, float]:
    return {int(token_id): float(row[token_id]) for token_id in (row > -40).nonzero().squeeze(1)}
