"""Compiled layers: their guards, and the code that they must not share."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from outrider.lm.compilation import _are_alike, can_compile, compile_layers, find_layers, num_together
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

    def forward(self, rows: torch.Tensor, given: object = None) -> torch.Tensor:
        return torch.relu(self.linear(rows)) + rows


def run_all(layers: list[nn.Module], rows: torch.Tensor) -> list[torch.Tensor]:
    outputs = [rows]
    for layer in layers:
        outputs.append(layer(outputs[-1]))
    return outputs[1:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
@pytest.mark.parametrize("size", [1, 2])
@torch.no_grad()
def test_layers_share_code_that_is_chosen_by_the_first_ones(size: int) -> None:
    layers: list[nn.Module] = [Layer() for _ in range(4)]
    inputs = [torch.randn(2, 4), torch.randn(7, 4), torch.randn(2, 3, 4), torch.randn(5, 4)]
    expected = [run_all(layers, rows) for rows in inputs]
    compile_layers(layers, size)
    codes = layers[0]._compiled_call_impl.__self__.codes  # type: ignore[union-attr]
    numbers = []
    for rows, values in zip(inputs, expected, strict=True):
        for output, value in zip(run_all(layers, rows), values, strict=True):
            assert torch.allclose(output, value)
        numbers.append(len(codes))
    # One code for any number of rows; another one where rows have another dimension.
    assert numbers == [1, 1, 2, 2]


class Holder(Layer):
    """Holds a tensor that is neither a parameter nor a buffer, as attention holds keys and values."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.held = torch.full((3, 4), value)

    def forward(self, rows: torch.Tensor, given: object = None) -> torch.Tensor:
        return super().forward(rows) + self.held[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
@pytest.mark.parametrize("shares_weights", [False, True])
@torch.no_grad()
def test_groups_share_code_and_keep_what_is_theirs(*, shares_weights: bool) -> None:
    layers: list[nn.Module] = [Holder(value) for value in (1.0, 2.0, 4.0, 8.0)]
    if shares_weights:
        layers[1].linear, layers[3].linear = layers[0].linear, layers[2].linear
    rows = torch.randn(5, 4)
    expected = run_all(layers, rows)
    compile_layers(layers, 2)
    codes = [layer._compiled_call_impl.__self__._codes for layer in layers[::2]]  # type: ignore[union-attr]
    for given in (rows, rows + 1, rows):
        found = run_all(layers, given)
    assert codes[0] is codes[1] and len(codes[0].codes) == 1
    for output, value in zip(found, expected, strict=True):
        assert torch.allclose(output, value)
    assert [float(layer.held[0, 0]) for layer in layers] == [1, 2, 4, 8]  # type: ignore[arg-type, index]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
@torch.no_grad()
def test_hidden_states_may_be_a_keyword() -> None:
    layer, rows = Layer(), torch.randn(5, 4)
    expected = [layer(given) for given in (rows, rows + 1, rows - 1)]
    compile_layers([layer])
    found = [layer(rows), layer(rows=rows + 1), layer(rows - 1)]
    for output, value in zip(found, expected, strict=True):
        assert torch.allclose(output, value)


class Maker(Layer):
    """Makes a tensor that only one group's code would have."""

    def __init__(self) -> None:
        super().__init__()
        self.made = [torch.randn(4)]

    def forward(self, rows: torch.Tensor, given: object = None) -> torch.Tensor:
        return super().forward(rows) + self.made[0]


@torch.no_grad()
def test_layers_whose_tensors_cannot_be_told_apart_are_not_compiled() -> None:
    layers: list[nn.Module] = [Maker() for _ in range(2)]
    compile_layers(layers)
    with pytest.raises(RuntimeError, match="tensors of their own"):
        run_all(layers, torch.randn(5, 4))


@pytest.mark.parametrize(("num", "size"), [(2, 2), (4, 4), (6, 3), (7, 1), (10, 5), (30, 5)])
def test_as_many_layers_as_divide_them_are_one_function(num: int, size: int) -> None:
    layers: list[nn.Module] = [Layer() for _ in range(num)]
    assert num_together(layers, lambda: run_all(layers, torch.randn(2, 4))) == size
    assert not any(layer._compiled_call_impl for layer in layers)


def test_layers_that_do_not_follow_each_other_stay_apart() -> None:
    layers: list[nn.Module] = [Layer() for _ in range(4)]
    rows = torch.randn(2, 4)

    def run(*, between: float = 1.0, skipped: int = -1, given: tuple[object, ...] = (None,) * 4) -> None:
        hidden = rows
        for place, layer in enumerate(layers):
            if place == 2:
                hidden = hidden * between if between != 1 else hidden
            if place != skipped:
                hidden = layer(hidden, given=given[place])

    shared = object()
    assert num_together(layers, run) == 4
    assert num_together(layers, lambda: run(given=(shared,) * 4)) == 4
    assert num_together(layers, lambda: run(between=2.0)) == 2
    assert num_together(layers, lambda: run(given=(None, None, shared, shared))) == 2
    assert num_together(layers, lambda: run(given=(None, shared, None, shared))) == 1
    assert num_together(layers, lambda: run(skipped=1)) == 1


def test_layers_that_are_one_function_are_those_of_alike_groups() -> None:
    layers: list[nn.Module] = [Layer() for _ in range(10)]

    def run() -> None:
        run_all(layers, torch.randn(2, 4))

    layers[3].extra = 1  # type: ignore[assignment]
    assert num_together(layers, run) == 1
    layers[8].extra = 1  # type: ignore[assignment]
    assert num_together(layers, run) == 5


@pytest.mark.slow
def test_models_of_one_shape_have_code_of_their_own(tmp_path: Path) -> None:
    for index, activation in enumerate(("silu", "gelu", "relu")):
        folder = save_model(LlamaConfig(**SMALL, hidden_act=activation), tmp_path / str(index))
        model = load_model(folder, LoadOptions(compiles=True)).model
        assert "pass-compiled" in model.info.numerics
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


def test_without_a_compiler_layers_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert can_compile(torch.device("cpu"))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert not can_compile(torch.device("cpu"))
    assert "no C++ compiler found" in caplog.text
