"""Names to models: a folder, a hub id, the embedded model, a Markov model of known law, or one of a planted pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from outrider.errors import ModelUnsupported
from outrider.lm import embedded
from outrider.lm.markov import MarkovModel
from outrider.lm.planted import PREFIX, PlantedModel, PlantedOptions

if TYPE_CHECKING:
    from outrider.lm.model import LanguageModel
    from outrider.lm.ranks import Ranks
    from outrider.lm.tokenizer import TokenizerFiles

_MARKOV: Final = "markov:"


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


def load_model(name: str, options: LoadOptions | None = None) -> LoadedModel:
    """Loads a causal language model and probes that it can be served exactly.

    Args:
        name: a folder, a hub id, `embedded`, `markov:` or `planted:` with options (see `markov`, `planted`).
        options: see there.

    Raises:
        InvalidArgument: a value is not understood.
        ModelUnsupported: the model cannot be loaded, or cannot be served exactly.
    """
    options = options or LoadOptions()
    if name.startswith(PREFIX):
        planted = PlantedOptions.from_name(name)
        base = load_model(planted.base, replace(options, num_layers=planted.num_layers or options.num_layers))
        return LoadedModel(PlantedModel(base.model, planted), base.tokenizer, base.run)
    if name.startswith(_MARKOV):
        if options.ranks is not None:
            raise ModelUnsupported("a Markov model has no weights to split among ranks")
        return LoadedModel(MarkovModel.from_name(name, options.kv_budget_bytes), None)
    # Imported here: transformers takes seconds, and a Markov model, which tests restart all the time, needs none of it.
    from outrider.lm.pretrained import load_pretrained

    return load_pretrained(name, str(embedded.ensure_embedded()) if name == embedded.NAME else name, options)


def chosen_device(name: str) -> str:
    """Returns the device that a setting means: of `auto`, a GPU where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
