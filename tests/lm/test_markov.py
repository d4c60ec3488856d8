"""The Markov model."""

import subprocess
import sys

import pytest
import torch

from outrider.errors import InvalidArgument
from outrider.lm.loading import load_model
from outrider.lm.markov import MarkovModel
from outrider.lm.model import SessionStep
from outrider.tokens import TokenSpan
from tests.proposals import chain


def test_logits_are_the_law_of_the_last_tokens() -> None:
    model = MarkovModel.from_name("markov:vocabulary=5,order=2,seed=3")
    cache = model.new_cache()
    logits = model.forward([SessionStep(cache, TokenSpan(0, (1, 4, 2)), chain((3, 0)))])[0]
    for row, last in enumerate([(4, 2), (2, 3), (3, 0)]):
        assert torch.allclose(logits[row].softmax(-1), model.transitions[last[1] + 5 * last[0]], atol=1e-12)
    cache.keep((1,))
    assert cache.cached_len == 4
    again = model.forward([SessionStep(cache, TokenSpan(4, (0,)))])[0]
    assert torch.equal(again[0], logits[2])


def test_noise_mixes_distributions() -> None:
    target = MarkovModel.from_name("markov:vocabulary=6")
    same = MarkovModel.from_name("markov:vocabulary=6,noise=0")
    draft = MarkovModel.from_name("markov:vocabulary=6,noise=0.5")
    assert torch.equal(target.transitions, same.transitions)
    assert 0.05 < (target.transitions - draft.transitions).abs().sum(-1).mean() / 2 < 0.5
    assert target.info.fingerprint != draft.info.fingerprint
    assert target.info.tokenizer_fingerprint == draft.info.tokenizer_fingerprint


@pytest.mark.parametrize(
    "name", ["markov:vocabulary=1", "markov:what=3", "markov:seed=x", "markov:vocabulary=99,order=9"]
)
def test_wrong_options_are_named(name: str) -> None:
    with pytest.raises(InvalidArgument, match="model"):
        load_model(name)


def test_workers_import_no_more_of_transformers_than_they_need() -> None:
    """Importing it takes seconds, and its models as long again; fault tests restart Markov models often."""
    modules = "target_service.__main__, target_service.own_engine, draft_service.__main__, outrider.drafters.model"
    load = "from outrider.lm.loading import load_model; load_model('markov:vocabulary=8')"
    code = (
        f"import sys, {modules}; {load}; assert 'transformers' not in sys.modules\n"
        "import outrider.drafters.heads; assert 'transformers.modeling_utils' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
