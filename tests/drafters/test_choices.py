"""How tokens are ranked: the first choice is the token that the same logits give at the target, equals included."""

import pytest
import torch

from outrider import native
from outrider.drafters.choices import Place, RankedChoices, SampledChoices, TreeOptions, keep_top
from outrider.drafters.drafter import OpenProposal
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.randomness import KeyedSource
from outrider.speculation.sampling import SamplingMetadata, TokenHistory, target_distribution
from outrider.speculation.verification import draft_coupled
from tests.draft_service.conftest import terms

V = 4096
TEXT = (1, 5, 9)


def _logits(num_levels: int, num_rows: int) -> torch.Tensor:
    """Returns rows in which many of the largest logits are equal: bfloat16 [num_rows, V]."""
    draw = torch.Generator().manual_seed(7)
    return (torch.randint(num_levels, (num_rows, V), generator=draw) / 8).bfloat16()


@pytest.mark.parametrize("num", [1, 3, 8])
@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0),
        SamplingParameters(temperature=0, logit_bias={17: 2.0, 3: 2.0}),
        SamplingParameters(temperature=0.7, seed=3),
        SamplingParameters(temperature=0.7, seed=3, top_k=20, top_p=0.8),
    ],
    ids=["greedy", "biased", "sampled", "truncated"],
)
@pytest.mark.parametrize("num_levels", [1, 2, 40, 2000])
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_the_first_choice_is_the_targets(
    num_levels: int, parameters: SamplingParameters, num: int, monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    variant = native.best_variant() if is_native else None
    monkeypatch.setattr(native, "loaded_variant", lambda: variant)
    logits, proposal = _logits(num_levels, 6), OpenProposal("s", list(TEXT), terms(parameters), 4)
    paths: list[tuple[int, ...]] = [(), (4,), (5,), (4, 4), (4, 6), (4, 6, 7)]
    ranked = RankedChoices(proposal, TreeOptions(), DraftVocabulary(torch.arange(V), V))
    choices = ranked.after([Place(path, 0) for path in paths], logits, num)
    for row, path, found in zip(logits, paths, choices, strict=True):
        token_ids, likelihoods = [item.token_id for item in found], [item.likelihood for item in found]
        history = TokenHistory(TEXT, path, parameters)
        distribution = target_distribution(row, SamplingMetadata(parameters, history, frozenset()))
        assert token_ids[0] == draft_coupled(distribution, len(TEXT) + len(path), KeyedSource(parameters.seed or 0))
        assert len(set(token_ids)) == len(token_ids) <= num and likelihoods == sorted(likelihoods, reverse=True)


LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
SIX = DraftVocabulary(torch.arange(6), 6)


def test_truncation_leaves_the_most_likely() -> None:
    distribution = LOGITS[0].double().softmax(0)
    assert keep_top(distribution, 6) is distribution
    kept = keep_top(distribution, 2)
    assert kept.nonzero().squeeze(1).tolist() == [0, 1]
    assert float(kept.sum()) == pytest.approx(1, abs=1e-15)
    assert float(kept[0] / kept[1]) == pytest.approx(float(distribution[0] / distribution[1]))


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_under_rejection_the_distribution_sent_is_the_one_drawn_from(top_k: int) -> None:
    drawn = [0] * 6
    for seed in range(2000):
        given = terms(SamplingParameters(seed=seed), AcceptanceRule.REJECTION)
        sampled = SampledChoices(
            OpenProposal("s", TEXT, given, 4), TreeOptions(top_k=top_k, p_min=0.9), SIX, KeyedSource(seed)
        )
        [[choice, *guesses]] = sampled.after([Place((), 0)], LOGITS, 3)
        assert choice.likelihood == 0, "nothing is ordered, or withheld, by its value"
        assert choice.token_id not in {guess.token_id for guess in guesses}
        drawn[choice.token_id] += 1
    distribution = choice.distribution
    assert distribution is not None and distribution.token_ids == tuple(range(top_k))
    assert distribution.probabilities == pytest.approx(keep_top(LOGITS[0].double().softmax(0), top_k)[:top_k].tolist())
    for token_id, probability in zip(distribution.token_ids, distribution.probabilities, strict=True):
        spread = (2000 * probability * (1 - probability)) ** 0.5
        assert abs(drawn[token_id] - 2000 * probability) <= 4.5 * spread


def _ranked(p_min: float, num: int) -> list[int]:
    proposal = OpenProposal("s", TEXT, terms(SamplingParameters(temperature=0)), 4)
    [found] = RankedChoices(proposal, TreeOptions(p_min=p_min), SIX).after([Place((), 0)], LOGITS, num)
    return [choice.token_id for choice in found]


@pytest.mark.parametrize("num", [1, 3])
def test_tokens_the_draft_doubts_end_a_branch(num: int) -> None:
    confidence = float(LOGITS[0].softmax(-1)[0])
    assert _ranked(confidence - 0.01, num) == [0]
    assert _ranked(confidence + 0.01, num) == []
