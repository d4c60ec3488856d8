"""Compiled layers: their guards, and the code that they must not share."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from outrider.lm.compilation import _are_alike, compile_layers, find_layers
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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(rows)) + rows


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
@torch.no_grad()
def test_layers_share_code_that_is_chosen_by_the_first_one() -> None:
    layers: list[nn.Module] = [Layer() for _ in range(3)]
    inputs = [torch.randn(2, 4), torch.randn(7, 4), torch.randn(2, 3, 4), torch.randn(5, 4)]
    expected = [layers[2](layers[1](layers[0](rows))) for rows in inputs]
    compile_layers(layers)
    numbers = []
    for rows, value in zip(inputs, expected, strict=True):
        assert torch.allclose(layers[2](layers[1](layers[0](rows))), value)
        numbers.append(len(layers[0]._compiled_call_impl.func._codes))  # type: ignore[union-attr]
    # One code for any number of rows; another one where rows have another dimension.
    assert numbers == [1, 1, 2, 2]


@pytest.mark.slow
def test_models_of_one_shape_have_code_of_their_own(tmp_path: Path) -> None:
    for index, activation in enumerate(("silu", "gelu", "relu")):
        folder = save_model(LlamaConfig(**SMALL, hidden_act=activation), tmp_path / str(index))
        model = load_model(folder, LoadOptions(compiles=True)).model
        assert "layers-compiled" in model.info.numerics
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
