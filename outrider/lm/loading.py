"""Names to models: a folder, a hub id, the embedded model, a Markov model of known law, or one of a planted pair."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TorchAoConfig,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm import attention, embedded
from outrider.lm.heads.checkpoint import load_vocabulary
from outrider.lm.markov import MarkovModel
from outrider.lm.model import LanguageModel
from outrider.lm.planted import PREFIX, PlantedModel, PlantedOptions
from outrider.lm.ranks import Ranks
from outrider.lm.tokenizer import TokenizerFiles, tokenizer_files
from outrider.lm.transformer import EngineOptions, PassPlan, TransformersModel
from outrider.lm.trimmed import TrimmedModel, trim_output_layer


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
    run: Callable[[PassPlan], object] | None = None


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Mapping[str, Any] | None = None,
    num_layers: int | None = None,
    kv_budget_bytes: int = 1 << 30,
    compiles: bool = False,
    ranks: Ranks | None = None,
    invariant: bool = True,
    trims: bool = False,
) -> LoadedModel:
    """Loads a causal language model and probes that it can be served exactly.

    Args:
        name: a folder, a hub id, `embedded`, `markov:` or `planted:` with options (see `markov`, `planted`).
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

    Raises:
        InvalidArgument: a value is not understood.
        ModelUnsupported: the model cannot be loaded, or cannot be served exactly.
    """
    if name.startswith(PREFIX):
        planted = PlantedOptions.from_name(name)
        base = load_model(
            planted.base,
            dtype=dtype,
            device=device,
            quantization=quantization,
            num_layers=planted.num_layers or num_layers,
            kv_budget_bytes=kv_budget_bytes,
            compiles=compiles,
            ranks=ranks,
            invariant=invariant,
        )
        return LoadedModel(PlantedModel(base.model, planted), base.tokenizer, base.run)
    if name.startswith("markov:"):
        if ranks is not None:
            raise ModelUnsupported("a Markov model has no weights to split among ranks")
        return LoadedModel(MarkovModel.from_name(name, kv_budget_bytes), None)
    source = str(embedded.ensure_embedded()) if name == embedded.NAME else name
    try:
        config = AutoConfig.from_pretrained(source)
        if ranks is not None:
            _check_split(config, ranks)
        tokenizer = _load_tokenizer(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=_first_layers(config, num_layers),
            dtype=_dtype(dtype),
            **_placement(chosen_device(device), ranks),
            attn_implementation=attention.NAME,
            output_loading_info=True,
            **({"quantization_config": _quantization(quantization)} if quantization else {}),
        )
    except (OSError, ValueError, ImportError, TypeError, AssertionError) as error:
        raise ModelUnsupported(f"cannot load {name}: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ModelUnsupported(
            f"cannot load {name}: its weights do not have the shapes of its configuration"
        ) from error
    model = _complete(name, *loaded)
    label = name if num_layers is None else f"{name}[:{num_layers}]"
    fingerprint = tokenizer.fingerprint if tokenizer else ""
    options = EngineOptions(
        kv_budget_bytes, compiles=compiles, packs=not quantization, ranks=ranks, invariant=invariant
    )
    vocabulary = load_vocabulary(Path(source)) if trims else None
    if vocabulary is not None:
        trim_output_layer(model, vocabulary)
    ready = TransformersModel(label, model, fingerprint, options)
    served = TrimmedModel(ready, vocabulary) if vocabulary is not None else ready
    return LoadedModel(served, tokenizer, ready.run)


def _complete(name: str, model: PreTrainedModel, loading: Mapping[str, Any]) -> PreTrainedModel:
    """Returns the model; refuses one whose checkpoint lacks weights, which transformers leaves as they were drawn."""
    if missing := sorted(loading["missing_keys"]):
        kind = model.config.model_type
        raise ModelUnsupported(f"{name} lacks {len(missing)} weights of a {kind} model, such as {missing[0]}")
    return model


def _first_layers(config: PretrainedConfig, num_layers: int | None) -> PretrainedConfig:
    if num_layers is None:
        return config
    text = config.get_text_config()
    if not 1 <= num_layers <= text.num_hidden_layers:
        raise InvalidArgument(f"num_layers is {num_layers}, the model has {text.num_hidden_layers}", "num_layers")
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return config


def _check_split(config: PretrainedConfig, ranks: Ranks) -> None:
    text = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        num = getattr(text, name, None) or ranks.num
        if num % ranks.num:
            raise ModelUnsupported(f"{name} is {num}, which {ranks.num} ranks cannot share evenly")


def _placement(device: str, ranks: Ranks | None) -> dict[str, Any]:
    if ranks is not None:
        return {"distributed_config": DistributedConfig(tp_size=ranks.num, tp_plan="auto")}
    return {} if device == "cpu" else {"device_map": device}


def _quantization(options: Mapping[str, Any]) -> QuantizationConfigMixin | dict[str, Any]:
    """Returns what transformers takes; of torchao's configs a name is enough where its defaults will do."""
    kind = options.get("quant_type")
    if options.get("quant_method") != "torchao" or not isinstance(kind, str):
        return dict(options)
    config = getattr(import_module("torchao.quantization"), kind, None)
    if config is None:
        raise InvalidArgument(f"torchao has no {kind}; one that it has is Int8WeightOnlyConfig", "quantization")
    rest = {key: value for key, value in options.items() if key not in ("quant_method", "quant_type")}
    return TorchAoConfig(config(), **rest)


def _load_tokenizer(source: str) -> TokenizerFiles | None:
    if Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").exists():
        return None
    tokenizer = AutoTokenizer.from_pretrained(source)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelUnsupported(f"the tokenizer of {source} has no fast form (tokenizer.json)")
    return tokenizer_files(tokenizer)


def _dtype(name: str) -> torch.dtype | str:
    known: dict[str, torch.dtype | str] = {
        "auto": "auto",
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
    }
    if name not in known:
        raise InvalidArgument(f"dtype is {name!r}, must be one of {', '.join(known)}", "dtype")
    return known[name]


def chosen_device(name: str) -> str:
    """Returns the device that a setting means: of `auto`, a GPU where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
