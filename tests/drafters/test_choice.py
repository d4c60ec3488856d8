import pytest
import torch

from outrider.drafters.choice import ChoiceOptions, choose, keep_top
from outrider.drafters.drafter import DraftTerms, OpenProposal
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.randomness import KeyedSource
from outrider.sampling import TokenHistory, target_distribution
from outrider.tokens import SparseDistribution
from outrider.verification import draft_coupled
from tests.draft_service.conftest import proposal, terms

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
ALL = ChoiceOptions(top_k=6, p_min=0.0)
TOKENS = (1, 2, 3)


def _history(item: OpenProposal) -> TokenHistory:
    return TokenHistory(item.token_ids[:1], item.token_ids[1:], item.terms.parameters)


def _choose(given: DraftTerms, options: ChoiceOptions) -> "tuple[int, object] | None":
    item = proposal(TOKENS, given=given)
    return choose(LOGITS, item, _history(item), options)


def test_coupled_drafts_are_the_draws_of_the_shared_noise() -> None:
    for seed in range(50):
        given = terms(SamplingParameters(seed=seed))
        law = target_distribution(LOGITS, given.parameters, _history(proposal(TOKENS, given=given)), ())
        assert _choose(given, ALL) == (draft_coupled(law, 3, KeyedSource(seed)), None)


def test_truncation_leaves_the_most_likely() -> None:
    law = LOGITS.double().softmax(0)
    assert keep_top(law, 6) is law
    kept = keep_top(law, 2)
    assert kept.nonzero().squeeze(1).tolist() == [0, 1]
    assert float(kept.sum()) == pytest.approx(1, abs=1e-15)
    assert float(kept[0] / kept[1]) == pytest.approx(float(law[0] / law[1]))


def test_under_rejection_the_law_sent_is_the_law_drawn_from() -> None:
    for top_k in (1, 3, 6):
        drawn = [0] * 6
        for seed in range(2000):
            choice = _choose(terms(SamplingParameters(seed=seed), AcceptanceRule.REJECTION), ChoiceOptions(top_k, 0.9))
            assert choice is not None, "nothing is withheld for its value"
            drawn[choice[0]] += 1
        law = choice[1]
        assert isinstance(law, SparseDistribution)
        assert law.token_ids == tuple(range(top_k))
        assert law.probabilities == pytest.approx(keep_top(LOGITS.double().softmax(0), top_k)[:top_k].tolist())
        for token_id, probability in zip(law.token_ids, law.probabilities, strict=True):
            spread = (2000 * probability * (1 - probability)) ** 0.5
            assert abs(drawn[token_id] - 2000 * probability) <= 4.5 * spread
        assert sum(drawn[token_id] for token_id in law.token_ids) == 2000


def test_tokens_the_model_doubts_end_a_branch() -> None:
    greedy = terms(SamplingParameters(temperature=0))
    confidence = float(LOGITS.double().softmax(0)[0])
    assert _choose(greedy, ChoiceOptions(6, confidence - 0.01)) == (0, None)
    assert _choose(greedy, ChoiceOptions(6, confidence + 0.01)) is None


def test_penalties_hold_along_the_branch() -> None:
    item = proposal(TOKENS, given=terms(SamplingParameters(temperature=0, presence_penalty=1.5)))
    drafted = []
    for _ in range(3):
        choice = choose(LOGITS, item, _history(item).extended(drafted), ALL)
        assert choice is not None
        drafted.append(choice[0])
        item.append(choice[0])
    assert drafted == [0, 1, 0], "2.0 falls to 0.5, then 1.0 to -0.5"
