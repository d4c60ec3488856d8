"""Equal keys stand for equal code, and what a key cannot stand for has none."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from outrider.lm.code_key import code_key
from outrider.lm.compilation import find_layers
from tests.lm.models import CONFIGS, SMALL

ROWS = torch.zeros(1, 4, 8)


def layers_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    return find_layers(model, config.num_hidden_layers)


def llama(**more: Any) -> list[nn.Module]:
    return layers_of(LlamaConfig(**{**SMALL, **more}))


def test_models_of_other_weights_have_the_same_key() -> None:
    keys = {code_key(llama(), ["a tensor", None], [ROWS]) for _ in range(2)}
    assert len(keys) == 1
    assert None not in keys


@pytest.mark.parametrize(
    "other",
    [
        lambda: code_key(llama(rms_norm_eps=1e-3), ["a tensor"], [ROWS]),
        lambda: code_key(llama(intermediate_size=96), ["a tensor"], [ROWS]),
        lambda: code_key(llama(hidden_act="gelu"), ["a tensor"], [ROWS]),
        lambda: code_key(llama(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), ["a tensor"], [ROWS]),
        lambda: code_key(layers_of(LlamaConfig(**SMALL), torch.bfloat16), ["a tensor"], [ROWS]),
        lambda: code_key(llama()[:1], ["a tensor"], [ROWS]),
        lambda: code_key(llama(), ["a tensor", None], [ROWS]),
        lambda: code_key(llama(), ["a tensor"], [ROWS[:, :3]]),
        lambda: code_key(llama(), ["a tensor"], [ROWS.transpose(1, 2)]),
        lambda: code_key(llama(), ["a tensor"], [ROWS.to(torch.bfloat16)]),
        lambda: code_key(layers_of(CONFIGS["qwen3"]), ["a tensor"], [ROWS]),
    ],
)
def test_other_code_has_another_key(other: Callable[[], str | None]) -> None:
    found = other()
    assert found is not None
    assert found != code_key(llama(), ["a tensor"], [ROWS])


def test_weights_that_layers_share_are_part_of_the_key() -> None:
    layers = llama()
    before = code_key(layers, [], [])
    layers[1].mlp, layers[1].self_attn = layers[0].mlp, layers[0].self_attn
    assert code_key(layers, [], []) not in (before, None)


def test_the_number_of_threads_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = llama()
    before = code_key(layers, [], [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert code_key(layers, [], []) not in (before, None)


class Own(nn.Module):
    """Code that no version stands for."""


class Odd(torch.Tensor):
    """Compiled code may take what it holds in its place."""


def test_what_no_version_stands_for_has_no_key() -> None:
    assert code_key([Own()], [], []) is None
    assert code_key(llama(), [object()], []) is None
    layers = llama()
    layers[0].mlp.register_forward_hook(lambda *_: None)
    assert code_key(layers, [], []) is None
    for extra in (lambda: None, [Own()], {"a": object()}, torch.zeros(2).as_subclass(Odd)):
        layers = llama()
        layers[0].extra = extra  # type: ignore[assignment]
        assert code_key(layers, [], []) is None
        layers[0].extra = [nn.functional.relu]  # type: ignore[assignment]
        assert code_key(layers, [], []) is not None


def test_where_a_checkpoint_is_from_has_no_part_in_the_key(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab"]
    found = [code_key([model], [], []) for model in models]
    assert found[0] == found[1] is not None
    models[0].config._attn_implementation = "eager"
    assert code_key([models[0]], [], []) not in (found[0], None)


@pytest.mark.parametrize("name", ["ATEN_CPU_CAPABILITY", "CXX", "TORCHINDUCTOR_FREEZING"])
def test_variables_of_the_compiler_are_part_of_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = llama()
    before = code_key(layers, [], [])
    monkeypatch.setenv(name, "default")
    assert code_key(layers, [], []) not in (before, None)
