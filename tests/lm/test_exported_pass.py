"""A recorded pass has the bits of the model's own code, for all numbers of rows; what cannot be recorded is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, GraniteConfig, LlamaConfig, OlmoConfig, Phi3Config, PretrainedConfig

from outrider.lm import code_store, transformer
from outrider.lm.compilation import find_layers
from outrider.lm.compiled_code import FlatCall
from outrider.lm.exported_pass import ExportedPass
from outrider.lm.features import FeatureStore
from outrider.lm.layer_group import GroupCodes, LayerGroup
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import SessionStep
from outrider.lm.probe import is_close, run_as_branch
from outrider.lm.transformer import TransformersModel
from outrider.tokens import TokenSpan
from tests.lm.models import CONFIGS, SMALL, save_model

BROAD = {name: value for name, value in SMALL.items() if name != "head_dim"}
OTHERS: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=16, query_pre_attn_scalar=8, layer_types=None),
    "olmo": OlmoConfig(**BROAD),
    "phi3": Phi3Config(**BROAD),
    "granite": GraniteConfig(**BROAD, logits_scaling=2.0),
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}


def rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **others}


OTHERS["longrope"] = LlamaConfig(**SMALL, rope_parameters=rope("longrope", **FACTORS))
SPANS = tuple(
    tuple(3 + (start + 5 * index) % 60 for index in range(size)) for start, size in enumerate((1, 2, 37, 300))
)


class Uncompiled(LayerGroup):
    """A group that runs its layers as they are."""

    def run(self, call: FlatCall) -> list[Any]:
        arguments, keywords = call.arguments(call.tensors)
        outputs = [self.layers[0].forward(*arguments, **keywords)]
        for layer in self.layers[1:]:
            outputs.append(layer.forward(outputs[-1], *arguments[1:], **keywords))
        return outputs


def loaded(config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.bfloat16) -> TransformersModel:
    model = load_model(save_model(config, folder, dtype=dtype), LoadOptions(kv_budget_bytes=1 << 22)).model
    assert isinstance(model, TransformersModel)
    return model


def exported(model: TransformersModel, size: int = 1) -> ExportedPass:
    layers = find_layers(model._model, model.info.num_layers)
    groups = [tuple(layers[first : first + size]) for first in range(0, len(layers), size)]
    try:
        return ExportedPass(model._model, [Uncompiled(GroupCodes(), group) for group in groups])
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def outputs(model: TransformersModel) -> list[Tensor]:
    """Return the logits of spans alone and together, of a tree, and the features of all layers."""
    store = model.features
    assert isinstance(store, FeatureStore)
    alone = [model.forward([SessionStep(model.new_cache(), TokenSpan(0, span))])[0] for span in SPANS]
    caches = [model.new_cache(bytes([number])) for number in range(len(SPANS))]
    together = model.forward(
        [SessionStep(cache, TokenSpan(0, span)) for cache, span in zip(caches, SPANS, strict=True)]
    )
    features = [store.read(cache, store.layers, 0, 1) for cache in caches] if store.layers else []
    return [*alone, *together, run_as_branch(model, SPANS[2]), *features]


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_it_has_the_bits_of_the_model(name: str, tmp_path: Path) -> None:
    model = loaded((CONFIGS | OTHERS)[name], tmp_path)
    before = outputs(model)
    model._exported_pass = exported(model)
    for found, wanted in zip(outputs(model), before, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [1, 3])
def test_it_has_the_features_of_any_layers(size: int, tmp_path: Path) -> None:
    model = loaded(CONFIGS["llama"], tmp_path)
    made = exported(model, size)
    store = model.features
    assert isinstance(store, FeatureStore)
    for layers in ((3,), (0, 2)):
        store.keep(layers)
        model._exported_pass = None
        before = outputs(model)
        model._exported_pass = made
        for found, wanted in zip(outputs(model), before, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
def test_compiled_ends_have_equal_bits_for_all_rows(tmp_path: Path) -> None:
    model = loaded(CONFIGS["gemma2-softcap-window"], tmp_path)
    store = model.features
    assert isinstance(store, FeatureStore)
    store.keep((0, 2, 3))
    before = outputs(model)
    model._exported_pass = exported(model).compiled()
    after = outputs(model)
    assert all(is_close(found, wanted) for found, wanted in zip(after, before, strict=True))
    for index, by_itself in enumerate(after[: len(SPANS)]):
        assert torch.equal(by_itself, after[len(SPANS) + index])


def started(folder: str, **more: Any) -> tuple[str, list[Tensor]]:
    """Returns what a start says of its bits, and outputs."""
    model = load_model(folder, LoadOptions(kv_budget_bytes=1 << 22, compiles=True, **more)).model
    assert isinstance(model, TransformersModel)
    return model.info.numerics, outputs(model)


def are_equal(one: tuple[str, list[Tensor]], other: tuple[str, list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def test_a_second_start_neither_traces_nor_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_store, "cache_dir", lambda: tmp_path / "cache")
    folder = save_model(CONFIGS["llama"], tmp_path / "model", dtype=torch.bfloat16)
    first = started(folder)
    assert "pass-compiled" in first[0]
    # Of the layers, and of what is around them.
    assert len(list((tmp_path / "cache").rglob("facts.json"))) == 2
    monkeypatch.setattr(torch.export, "export", None)
    monkeypatch.setattr(torch._inductor, "standalone_compile", None)
    assert are_equal(started(folder), first)


def test_code_that_makes_other_logits_is_neither_kept_nor_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_store, "cache_dir", lambda: tmp_path / "cache")
    folder = save_model(CONFIGS["llama"], tmp_path / "model", dtype=torch.bfloat16)
    with monkeypatch.context() as without:
        without.setattr(transformer, "is_close", lambda *_: False)
        assert "layers-compiled" in started(folder)[0]
        assert not list((tmp_path / "cache").rglob("facts.json"))
    started(folder)
    assert len(list((tmp_path / "cache").rglob("facts.json"))) == 2
    monkeypatch.setattr(transformer, "is_close", lambda *_: False)
    assert "layers-uncompiled" in started(folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longrope", "int8"])
def test_what_cannot_be_kept_is_compiled_at_each_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_store, "cache_dir", lambda: tmp_path / "cache")
    config, quantization = CONFIGS["llama"], None
    if name == "int8":
        # The inputs of its code are what quantised weights hold.
        quantization = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
    else:
        # Frequencies that are no buffer of the model.
        config = OTHERS[name]
    folder = save_model(config, tmp_path / "model", dtype=torch.bfloat16)
    first = started(folder, quantization=quantization)
    assert "pass-compiled" in first[0]
    assert are_equal(started(folder, quantization=quantization), first)


@pytest.mark.slow
def test_a_pass_that_cannot_be_recorded_runs_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = save_model(LlamaConfig(**SMALL, rope_parameters=rope("dynamic")), tmp_path)
    model = load_model(folder, LoadOptions(compiles=True)).model
    assert "layers-compiled" in model.info.numerics
    assert "between its layers the model runs as it is" in caplog.text


@pytest.mark.parametrize("name", ["llama", "longrope"])
def test_the_model_is_left_as_it_was(name: str, tmp_path: Path) -> None:
    model = loaded((CONFIGS | OTHERS)[name], tmp_path)
    before = outputs(model)
    exported(model)
    assert all(torch.equal(found, wanted) for found, wanted in zip(outputs(model), before, strict=True))


def test_a_pass_that_depends_on_the_values_of_positions_is_refused(tmp_path: Path) -> None:
    model = loaded(LlamaConfig(**SMALL, rope_parameters=rope("dynamic")), tmp_path)
    with pytest.raises(RuntimeError, match="cannot be exported"):
        exported(model)


class Branching(torch.nn.Module):
    """An embedding that is another one for some numbers of rows."""

    def __init__(self, embedding: torch.nn.Module, is_special: Callable[[int], bool]) -> None:
        super().__init__()
        self.embedding = embedding
        self.is_special = is_special

    def forward(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(token_ids)
        return embedded * 2 if self.is_special(token_ids.shape[1]) else embedded


def test_a_pass_that_leaves_out_a_layer_is_refused(tmp_path: Path) -> None:
    model = loaded(CONFIGS["llama"], tmp_path)
    decoder = model._model.base_model
    layers = decoder.layers
    decoder.config.num_hidden_layers = 2
    groups = [Uncompiled(GroupCodes(), (layer,)) for layer in layers]
    with pytest.raises(RuntimeError, match="not called in order"):
        ExportedPass(model._model, groups)


CONDITIONS: list[Callable[[int], bool]] = [
    lambda size: size <= 3,
    lambda size: size > 100,
    lambda size: size == 6,
    lambda size: size == 7,
    lambda size: size % 2 == 1,
]


@pytest.mark.parametrize("is_special", CONDITIONS)
def test_a_pass_that_depends_on_its_number_of_rows_is_refused(
    is_special: Callable[[int], bool], tmp_path: Path
) -> None:
    model = loaded(CONFIGS["llama"], tmp_path)
    model._model.set_input_embeddings(Branching(model._model.get_input_embeddings(), is_special))
    with pytest.raises(RuntimeError, match="depends on its sizes"):
        exported(model)
