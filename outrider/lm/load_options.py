"""How a model is loaded, and what loading returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from outrider.lm.model import LanguageModel
    from outrider.lm.ranks import Ranks
    from outrider.lm.tokenizer import TokenizerFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded, and what it may use.

    Attributes:
        dtype: `auto` (the checkpoint's), `bfloat16`, `float16` or `float32`.
        device: `auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, ...
        quantization: a transformers quantisation config as a mapping with `quant_method`; for torchao, `quant_type` may
            be the name of one of its configs, such as `Int8WeightOnlyConfig`.
        num_layers: loads only the first layers, with the final norm and the head; None for all.
        kv_budget_bytes: memory of the KV cache of all sessions, at most.
        compiles: whether to compile the layers, where that can be done.
        ranks: the processes among which the model is split, by transformers' plan for it; None for this one alone.
        invariant: see `EngineOptions`.
        trims: whether to compute logits only for the draft vocabulary that lies beside the model, if one does.
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
    """A model that is ready.

    Attributes:
        model: the model.
        tokenizer: None where it has none.
        run: what `Ranks.follow` calls; None where a model cannot be split.
    """

    model: LanguageModel
    tokenizer: TokenizerFiles | None
    run: Callable[[Sequence[int]], object] | None = None


def chosen_device(name: str) -> str:
    """Returns the device that a setting means: of `auto`, a GPU where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
