"""Reading block heads of others: DFlash's and DSpark's (their authors' layout and vLLM's speculators), and P-EAGLE's.

What a configuration or a checkpoint has that would change the computation, and is not read here, is refused by name: a
head that is run otherwise than it was trained drafts badly, and says nothing about it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.activations import ACT2FN

from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm.heads.dflash import DFlashConfig, DFlashHead, LayerKind
from outrider.lm.heads.eagle3 import NUM_FEATURES
from outrider.lm.heads.files import (
    OutputRows,
    add_output_layer,
    fill,
    named_feature_layers,
    read_config,
    read_weights,
    take_vocabulary,
)
from outrider.lm.heads.parallel import ParallelHead
from outrider.lm.heads.peagle import PEagleConfig, PEagleHead
from outrider.lm.heads.vocabulary import DraftVocabulary

_SPECULATORS: Final = "speculators_model_type"
_EMBEDDING: Final = "embed_tokens.weight"
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_MASK_TOKENS: Final = ("mask_token_id", "pard_token", "ptd_token_id")
_LAYER_FIELDS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
_SLIDING_FIELDS: Final = ("use_sliding_window", "sliding_window", "max_window_layers")
_PARTS: Final = ("transformer_layer_config", "eagle_config", "dspark_config", "dflash_config")
_NOT_READ: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "final_logit_softcapping": (0,),
    "hybrid_context_fusion": (False,),
    "is_neox_style": (True,),
    "logit_scale": (1,),
    "output_multiplier": (1,),
    "partial_rotary_factor": (1,),
    "projector_type": ("dflash", "dspark"),
    "quantization_config": (),
    "shift_label": (False,),
    "topk_context": (0,),
    "use_aux_hidden_state": (True,),
}
"""Settings that are not read, and the values that change nothing; None never does."""
_NOT_NEEDED: Final = ("confidence_head.", "verifier_", "rotary_emb.")
"""Beginnings of the names of weights that drafting does not need: acceptance is measured, not predicted."""
_DEFAULT_DEPTH: Final = 8
"""Tokens that P-EAGLE's heads are trained to predict, where the configuration does not say."""


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a DFlash or a DSpark head."""
    names = [str(config.get(_SPECULATORS, "")), *(config.get("architectures") or ())]
    return "dflash_config" in config or any(part in name.lower() for name in names for part in ("dflash", "dspark"))


def is_peagle(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a P-EAGLE head."""
    return not is_dflash(config) and (
        config.get(_SPECULATORS) == "peagle" or any(config.get(name) is not None for name in _MASK_TOKENS)
    )


def load_published_block(
    folder: Path, output_rows: OutputRows | None = None
) -> tuple[ParallelHead, DraftVocabulary] | None:
    """Return a block head of others and its vocabulary, in bfloat16; None where the folder is not of one.

    Args:
        folder: folder with configuration and weights.
        output_rows: source of the output layer of a head that has none.

    Raises:
        ModelUnsupported: a file, weight, map or setting is missing, is not read, or does not fit; the message names it.
    """
    config = read_config(folder)
    try:
        is_of_dflash = is_dflash(config)
        if not is_of_dflash and not is_peagle(config):
            return None
        weights = _wanted(read_weights(folder))
        fields = _checked(config)
        layer, types = _layer(fields, "qwen3" if is_of_dflash else "llama")
        vocabulary = take_vocabulary(weights, layer.vocab_size, fields.get("draft_vocab_size"))
        if vocabulary.target_size != layer.vocab_size:
            raise ModelUnsupported(f"the map t2d has {vocabulary.target_size} tokens, vocab_size is {layer.vocab_size}")
        make = _dflash if is_of_dflash else _peagle
        head = make(config, fields, layer, types, len(vocabulary), weights).to(torch.bfloat16)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StrictDataclassError) as error:
        raise ModelUnsupported(f"{folder / 'config.json'} is not valid: {type(error).__name__}: {error}") from error
    except InvalidArgument as error:
        raise ModelUnsupported(f"{folder} is not valid: {error.message}") from error
    add_output_layer(weights, vocabulary, output_rows)
    fill(head, weights)
    if unread := sorted(weights.keys() - head.state_dict().keys()):
        raise ModelUnsupported(f"{folder} has weights of a layout that is not read: {', '.join(unread[:3])}")
    return head, vocabulary


def _wanted(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that drafting needs, under the names that the heads have for them."""
    found: dict[str, Tensor] = {}
    for given, item in weights.items():
        name = given.removeprefix("model.")
        if name.startswith("midlayer."):
            name = f"layers.0.{name.removeprefix('midlayer.')}"
        if not name.startswith(_NOT_NEEDED):
            found[name] = item
    return found


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration and of its parts, of which the innermost hold.

    Raises:
        ModelUnsupported: one is not read and would change something.
    """
    fields = {**config, **{name: value for part in _PARTS for name, value in (config.get(part) or {}).items()}}
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    if layers := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ModelUnsupported(f"heads with rope_parameters of their own for {layers[0]} are not read")
    for name, neutral in _NOT_READ.items():
        for given in (fields.get(name), rope.get(name)):
            if given is not None and given not in neutral:
                raise ModelUnsupported(f"heads with {name} {given!r} are not read")
    return fields


def _layer(fields: Mapping[str, Any], usual: str) -> tuple[LlamaConfig, tuple[str, ...]]:
    """Return the configuration of the decoder layers, and each one's type."""
    model_type = fields.get("model_type") or usual
    if model_type not in ("llama", "qwen3"):
        raise ModelUnsupported(f"heads with layers of model_type {model_type} are not read")
    if (act := fields.get("hidden_act", "silu")) not in ACT2FN:
        raise ModelUnsupported(f"heads with hidden_act {act!r} are not read")
    given = {name: fields[name] for name in (*_LAYER_FIELDS, *_SLIDING_FIELDS) if fields.get(name) is not None}
    # By the class of that type, for its defaults.
    like = AutoConfig.for_model(model_type, **given)
    names = [name for name in _LAYER_FIELDS if name not in ("rope_theta", "rope_scaling")]
    layer = LlamaConfig(**{name: getattr(like, name) for name in names if hasattr(like, name)})
    num_layers = layer.num_hidden_layers
    types = fields.get("layer_types") or getattr(like, "layer_types", None) or [_FULL] * num_layers
    if len(types) < num_layers or not set(types) <= {_FULL, _SLIDING}:
        raise ModelUnsupported(
            f"heads of {num_layers} layers with layer_types {', '.join(map(str, types))} are not read"
        )
    return layer, tuple(types[:num_layers])


def _dflash(
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    layer: LlamaConfig,
    types: tuple[str, ...],
    draft_vocab_size: int,
    weights: dict[str, Tensor],
) -> DFlashHead:
    is_dspark = fields.get("projector_type") == "dspark" or any(
        "dspark" in str(config.get(name, "")).lower() for name in ("architectures", _SPECULATORS)
    )
    markov_rank = _number(fields, "markov_rank") if is_dspark else 0
    kind = fields.get("markov_head_type") or "vanilla"
    if markov_rank and kind not in ("vanilla", "gated"):
        raise ModelUnsupported(f"heads with markov_head_type {kind!r} are not read")
    num_rows = _number(fields, "block_size")
    from_anchor = is_dspark and _predicts_from_anchor(config, fields, num_rows)
    layers = named_feature_layers(config)
    if not layers:
        raise ModelUnsupported("the head's configuration has no target_layer_ids")
    if num_rows <= (not from_anchor):
        raise ModelUnsupported(f"a head with block_size {num_rows} predicts no token")
    if is_dspark:
        weights.pop("mask_embedding", None)  # a placeholder there
    scale = fields.get("input_embedding_scale")
    return DFlashHead(
        DFlashConfig(
            layer,
            layer.num_hidden_layers,
            int(fields.get("target_hidden_size") or layer.hidden_size),
            len(layers),
            draft_vocab_size,
            num_rows if from_anchor else num_rows - 1,
            _number(fields, *_MASK_TOKENS),
            _EMBEDDING in weights,
            kinds=tuple(_kind(fields, types, number) for number in range(len(types))),
            predicts_from_anchor=from_anchor,
            embedding_scale=1.0 if scale is None else float(scale),
            has_mask_embedding="mask_embedding" in weights,
            markov_rank=markov_rank,
            is_gated=kind == "gated",
        )
    )


def _predicts_from_anchor(config: Mapping[str, Any], fields: Mapping[str, Any], num_rows: int) -> bool:
    """Return whether the rows of a DSpark head predict the tokens behind their own."""
    if (said := fields.get("sample_from_anchor")) is not None:
        return bool(said)
    if _SPECULATORS not in config:
        return not fields.get("dspark_bonus_anchor")
    # Its default differs between versions; the number of tokens tells.
    num_tokens = _num_proposed(config)
    if num_tokens not in (num_rows, num_rows - 1):
        raise ModelUnsupported("the head's configuration has no sample_from_anchor")
    return num_tokens == num_rows


def _kind(fields: Mapping[str, Any], types: tuple[str, ...], number: int) -> LayerKind:
    """Return how the rows of a block attend in a layer; where nothing else is said, causally in a sliding one."""
    is_sliding = types[number] == _SLIDING or (bool(fields.get("use_swa")) and _SLIDING not in types)
    said = [fields[name] for name in ("is_causal", "causal") if fields.get(name) is not None]
    usually = types[number] == _SLIDING and not fields.get("sliding_window_non_causal")
    is_causal = bool(said[0]) if said else usually
    if not is_sliding:
        return LayerKind(is_causal, None)
    window = _number(fields, "swa_window_size", "sliding_window")
    if window < 1:
        raise ModelUnsupported(f"the head's sliding_window is {window}, must be at least 1")
    return LayerKind(is_causal, window)


def _peagle(
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    layer: LlamaConfig,
    types: tuple[str, ...],
    draft_vocab_size: int,
    weights: dict[str, Tensor],
) -> PEagleHead:
    if _SLIDING in types or fields.get("is_causal") is False:
        raise ModelUnsupported("P-EAGLE heads with sliding_attention, or that are not causal, are not read")
    for number in range(1, layer.num_hidden_layers):
        weights.pop(f"layers.{number}.hidden_norm.weight", None)  # only the first has features to normalise
    if (mask := weights.get("mask_hidden")) is not None:
        weights["mask_hidden"] = mask.reshape(1, -1)
    given = (_num_proposed(config), fields.get("num_depths"), fields.get("para_depths"))
    depth = next((int(item) for item in given if item is not None), _DEFAULT_DEPTH)
    if depth < 1:
        raise ModelUnsupported(f"a head with num_depths {depth} predicts no token")
    return PEagleHead(
        PEagleConfig(
            layer,
            layer.num_hidden_layers,
            int(fields.get("target_hidden_size") or layer.hidden_size),
            len(named_feature_layers(config)) or NUM_FEATURES,
            draft_vocab_size,
            depth,
            _number(fields, *_MASK_TOKENS),
            _EMBEDDING in weights,
            norm_before_residual=bool(fields.get("norm_before_residual", False)),
        )
    )


def _num_proposed(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of a proposal as vLLM's speculators configure them; None where they do not."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    given = methods[0].get("speculative_tokens") if methods else None
    return None if given is None else int(given)


def _number(fields: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that is given; raise `ModelUnsupported` where none is, or it is no number."""
    for name in names:
        if (given := fields.get(name)) is not None:
            try:
                return int(given)
            except (TypeError, ValueError) as error:
                raise ModelUnsupported(f"the head's {name} is {given!r}, must be a number") from error
    raise ModelUnsupported(f"the head's configuration has no {' or '.join(names)}")
