"""Random weights of known shapes."""

import pytest
import torch
from transformers import LlamaConfig

from bench.shapes import SHAPES, ensure_shape, random_model
from outrider.errors import InvalidArgument
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model


def test_weights_are_random_and_the_same_each_time() -> None:
    model, again = (random_model(LlamaConfig(**SHAPES["tiny"])) for _ in range(2))
    for (name, weight), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other)
        assert weight.dtype is torch.bfloat16
        assert (weight.float().std() > 0.01) == (weight.ndim > 1), name


def test_a_shape_is_served() -> None:
    info = load_model(str(ensure_shape("tiny")), LoadOptions(compiles=False)).model.info
    assert (info.vocabulary_size, info.max_session_len, info.eos_token_ids) == (512, 8192, (2,))


@pytest.mark.parametrize(("target", "draft"), [("8b", "1b"), ("tiny", "tiny")])
def test_the_shapes_of_a_pair_share_their_vocabulary(target: str, draft: str) -> None:
    for key in ("vocab_size", "eos_token_id"):
        assert SHAPES[target][key] == SHAPES[draft][key]


def test_an_8b_has_8_billion_weights() -> None:
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        models = {name: AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[name])) for name in ("8b", "1b")}
    counts = {name: sum(item.numel() for item in model.parameters()) / 1e9 for name, model in models.items()}
    assert counts == pytest.approx({"8b": 8.03, "1b": 1.24}, rel=0.01)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the shapes are 8b"):
        ensure_shape("9b")
