"""How tokens are ranked: the first choice is the token that the same logits give at the target, equals included."""

import pytest
import torch

from outrider.drafters.drafter import OpenProposal
from outrider.drafters.growth import NoisyRanking
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import SamplingParameters
from outrider.randomness import KeyedSource
from outrider.sampling import TokenHistory, target_distribution
from outrider.verification import draft_coupled
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
def test_the_first_choice_is_the_targets(num_levels: int, parameters: SamplingParameters, num: int) -> None:
    logits, proposal = _logits(num_levels, 6), OpenProposal("s", list(TEXT), terms(parameters), 4)
    paths: list[tuple[int, ...]] = [(), (4,), (5,), (4, 4), (4, 6), (4, 6, 7)]
    ranked = NoisyRanking(proposal, DraftVocabulary(torch.arange(V), V), 0.0).rank(logits, paths, num)
    for row, path, found in zip(logits, paths, ranked, strict=True):
        token_ids, logs = [token_id for token_id, _ in found], [log for _, log in found]
        history = TokenHistory(TEXT, path, parameters)
        law = target_distribution(row, parameters, history, frozenset())
        assert token_ids[0] == draft_coupled(law, len(TEXT) + len(path), KeyedSource(parameters.seed or 0))
        assert len(set(token_ids)) == len(token_ids) <= num and logs == sorted(logs, reverse=True)
