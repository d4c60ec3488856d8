"""Options and result of loading a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from outrider.lm.model import LanguageModel
    from outrider.lm.ranks import Ranks
    from outrider.lm.tokenizer import TokenizerFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of loading a model.

    Attributes:
        dtype: `auto` (the checkpoint's), `bfloat16`, `float16` or `float32`.
        device: `auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, ...
        quantization: a transformers quantisation config as a mapping with `quant_method`; for torchao, `quant_type` may
            be the name of one of its configs, such as `Int8WeightOnlyConfig`.
        num_layers: loads only the first layers, with the final norm and the head; None for all.
        kv_budget_bytes: maximum memory of the KV cache of all sessions.
        compiles: whether to compile the layers, if the device supports it.
        ranks: tensor-parallel processes, by transformers' plan for the model; None for a single process.
        invariant: whether bits must not depend on the batch; see `EngineOptions`.
        trims: whether to compute logits only for the draft vocabulary in the model's folder, if there is one.
    """

    dtype: str = "auto"
    device: str = "auto"
    quantization: Mapping[str, Any] | None = None
    num_layers: int | None = None
    kv_budget_bytes: int = 1 << 30
    compiles: bool = False
    ranks: Ranks | None = None
    invariant: bool = True
    trims: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with its tokenizer.

    Attributes:
        model: the model.
        tokenizer: files of the tokenizer; None if the model has none.
        run: the function that `Ranks.follow` calls; None if the model cannot be split.
        default_parameters: sampling parameters that the model recommends; see `generation_config`.
    """

    model: LanguageModel
    tokenizer: TokenizerFiles | None
    run: Callable[[Sequence[int]], object] | None = None
    default_parameters: Mapping[str, float] = field(default_factory=dict)


def chosen_device(name: str) -> str:
    """Return the device of a setting; `auto` selects a GPU if there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
