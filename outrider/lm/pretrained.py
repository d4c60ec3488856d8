"""Loading of transformers checkpoints, with Outrider's paged attention."""

from collections.abc import Mapping
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
from outrider.lm.attention.interface import NAME as ATTENTION
from outrider.lm.generation_config import default_parameters
from outrider.lm.heads.checkpoint import load_vocabulary
from outrider.lm.hub import check_available
from outrider.lm.load_options import LoadedModel, LoadOptions, chosen_device
from outrider.lm.ranks import Ranks
from outrider.lm.tokenizer import TokenizerFiles, tokenizer_files
from outrider.lm.transformer import EngineOptions, TransformersModel
from outrider.lm.trimmed import TrimmedModel, trim_output_layer


def load_pretrained(name: str, source: str, options: LoadOptions) -> LoadedModel:
    """Load a checkpoint and check that it can be served exactly.

    Args:
        name: name of the model in errors and `ModelInfo`.
        source: folder or hub id of the checkpoint.
        options: see `LoadOptions`.

    Raises:
        InvalidArgument: an option is invalid.
        ModelUnsupported: the model cannot be had or loaded, or cannot be served exactly.
    """
    check_available(source)
    tokenizer, model = _read(name, source, options)
    label = name if options.num_layers is None else f"{name}[:{options.num_layers}]"
    engine = EngineOptions(
        options.kv_budget_bytes,
        compiles=options.compiles,
        packs=not options.quantization,
        ranks=options.ranks,
        invariant=options.invariant,
    )
    vocabulary = load_vocabulary(Path(source)) if options.trims else None
    if vocabulary is not None:
        trim_output_layer(model, vocabulary)
    ready = TransformersModel(label, model, tokenizer.fingerprint if tokenizer else "", engine)
    served = TrimmedModel(ready, vocabulary) if vocabulary is not None else ready
    return LoadedModel(served, tokenizer, ready.follow, default_parameters(source))


def _read(name: str, source: str, options: LoadOptions) -> tuple[TokenizerFiles | None, PreTrainedModel]:
    quantization = {"quantization_config": _quantization(options.quantization)} if options.quantization else {}
    try:
        config = AutoConfig.from_pretrained(source)
        if options.ranks is not None:
            _check_split(config, options.ranks)
        tokenizer = _load_tokenizer(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=_first_layers(config, options.num_layers),
            dtype=_dtype(options.dtype),
            **_placement(chosen_device(options.device), options.ranks),
            attn_implementation=ATTENTION,
            output_loading_info=True,
            **quantization,
        )
    except (OSError, ValueError, ImportError, TypeError, AssertionError) as error:
        raise ModelUnsupported(f"cannot load {name}: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ModelUnsupported(
            f"cannot load {name}: its weights do not have the shapes of its configuration"
        ) from error
    return tokenizer, _complete(name, *loaded)


def _complete(name: str, model: PreTrainedModel, loading: Mapping[str, Any]) -> PreTrainedModel:
    """Return the model; raise `ModelUnsupported` if its checkpoint lacks weights, which would then be random."""
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
            raise ModelUnsupported(f"{name} is {num}, must be divisible by the number of ranks, {ranks.num}")


def _placement(device: str, ranks: Ranks | None) -> dict[str, Any]:
    if ranks is not None:
        return {"distributed_config": DistributedConfig(tp_size=ranks.num, tp_plan="auto")}
    return {} if device == "cpu" else {"device_map": device}


def _quantization(options: Mapping[str, Any]) -> QuantizationConfigMixin | dict[str, Any]:
    """Return the quantisation for transformers; `quant_type` of torchao may be the name of a config class."""
    kind = options.get("quant_type")
    if options.get("quant_method") != "torchao" or not isinstance(kind, str):
        return dict(options)
    config = getattr(import_module("torchao.quantization"), kind, None)
    if config is None:
        raise InvalidArgument(f"torchao has no {kind}; an example is Int8WeightOnlyConfig", "quantization")
    rest = {key: value for key, value in options.items() if key not in ("quant_method", "quant_type")}
    return TorchAoConfig(config(), **rest)


def _load_tokenizer(source: str) -> TokenizerFiles | None:
    if Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").exists():
        return None
    tokenizer = AutoTokenizer.from_pretrained(source)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelUnsupported(f"the tokenizer of {source} is not a fast tokenizer (tokenizer.json)")
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
