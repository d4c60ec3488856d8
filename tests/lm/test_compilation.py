"""Compiled layers: their guards, and the code that they must not share."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from outrider.lm.compilation import _are_alike, find_layers
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import LanguageModel, SessionStep
from outrider.tokens import TokenSpan
from tests.lm.models import CONFIGS, SMALL, save_model

TOKENS = tuple(range(3, 40))


def logits(model: LanguageModel, tokens: tuple[int, ...] = TOKENS) -> torch.Tensor:
    return model.forward([SessionStep(model.new_cache(), TokenSpan(0, tokens))])[0][0]


@pytest.mark.parametrize(("name", "alike"), [("llama", True), ("qwen3", True), ("gemma2-softcap-window", False)])
def test_layers_are_alike_where_only_weights_differ(name: str, alike: bool) -> None:
    config: PretrainedConfig = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config)
    layers = find_layers(model, config.num_hidden_layers)
    assert len(layers) == config.num_hidden_layers
    assert _are_alike(layers) is alike


@pytest.mark.slow
def test_models_of_one_shape_have_code_of_their_own(tmp_path: Path) -> None:
    for index, activation in enumerate(("silu", "gelu", "relu")):
        folder = save_model(LlamaConfig(**SMALL, hidden_act=activation), tmp_path / str(index))
        model = load_model(folder, LoadOptions(compiles=True)).model
        assert "flex" in model.info.numerics
        reference = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            expected = reference(torch.tensor([TOKENS])).logits[0, -1]
        assert (logits(model) - expected).abs().max() < 1e-3 * expected.abs().max(), activation


@pytest.mark.slow
def test_a_pass_may_have_more_rows_than_any_before(tmp_path: Path) -> None:
    model = load_model(save_model(CONFIGS["llama"], tmp_path), LoadOptions(compiles=True)).model
    sessions = [tuple((start + index) % 60 + 3 for index in range(1500)) for start in range(3)]
    alone = [logits(model, tokens) for tokens in sessions]
    model.new_cache().release()
    steps = [SessionStep(model.new_cache(bytes([n])), TokenSpan(0, tokens)) for n, tokens in enumerate(sessions)]
    for together, by_itself in zip(model.forward(steps), alone, strict=True):
        assert torch.equal(together[0], by_itself)
    assert torch.equal(logits(model, sessions[0]), alone[0])
