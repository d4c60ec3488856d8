"""Reading block heads of others: DFlash's and DSpark's (their authors' layout and vLLM's speculators), and P-EAGLE's.

What a configuration or a checkpoint has that would change the computation, and is not read here, is refused by name: a
head that is run otherwise than it was trained drafts badly, and says nothing about it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from outrider.errors import ModelUnsupported
from outrider.lm.heads.dflash import DFlashConfig, DFlashHead, LayerKind
from outrider.lm.heads.files import OutputRows, add_output_layer, fill, read_config, read_weights, take_vocabulary
from outrider.lm.heads.parallel import ParallelHead
from outrider.lm.heads.peagle import PEagleConfig, PEagleHead
from outrider.lm.heads.vocabulary import DraftVocabulary

_SPECULATORS: Final = "speculators_model_type"
_EMBEDDING: Final = "embed_tokens.weight"
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


def dflash_feature_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the target layers whose inputs a DFlash or DSpark head fuses; empty where the configuration has none.

    The authors' layout has the layers whose outputs they are, which are one lower.
    """
    outputs = _merged(config).get("target_layer_ids")
    inputs = config.get("aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    return tuple(inputs or [layer + 1 for layer in outputs or ()])


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
    if not is_dflash(config) and not is_peagle(config):
        return None
    weights = {name.removeprefix("model."): item for name, item in read_weights(folder).items()}
    weights = {name: item for name, item in weights.items() if not name.startswith(_NOT_NEEDED)}
    try:
        fields = _checked(config)
        layer, num_layers = _layer(fields, "qwen3" if is_dflash(config) else "llama")
        vocabulary = take_vocabulary(weights, layer.vocab_size, fields.get("draft_vocab_size"))
        make = _dflash if is_dflash(config) else _peagle
        head = make(config, fields, layer, num_layers, len(vocabulary), weights)
    except KeyError as error:
        raise ModelUnsupported(f"{folder / 'config.json'} has no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise ModelUnsupported(f"{folder / 'config.json'} is not valid: {error}") from error
    head = head.to(torch.bfloat16)
    add_output_layer(weights, vocabulary, output_rows)
    fill(head, weights)
    if unread := sorted(weights.keys() - head.state_dict().keys()):
        raise ModelUnsupported(f"{folder} has weights of a layout that is not read: {', '.join(unread[:3])}")
    return head, vocabulary


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration and of its parts, the innermost first."""
    parts = ("transformer_layer_config", "eagle_config", "dspark_config", "dflash_config")
    return {**config, **{name: value for part in parts for name, value in (config.get(part) or {}).items()}}


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged fields; raise `ModelUnsupported` for one that is not read and would change something."""
    fields = _merged(config)
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    for name, neutral in _NOT_READ.items():
        for given in (fields.get(name), rope.get(name)):
            if given is not None and given not in neutral:
                raise ModelUnsupported(f"heads with {name} {given!r} are not read")
    return fields


def _layer(fields: Mapping[str, Any], usual: str) -> tuple[LlamaConfig, int]:
    """Return the configuration of the decoder layers, and their number."""
    model_type = fields.get("model_type") or usual
    if model_type not in ("llama", "qwen3"):
        raise ModelUnsupported(f"heads with layers of model_type {model_type} are not read")
    given = {name: fields[name] for name in _LAYER_FIELDS if fields.get(name) is not None}
    # By the class of that type, for its defaults.
    like = AutoConfig.for_model(model_type, **given)
    names = [name for name in _LAYER_FIELDS if name not in ("rope_theta", "rope_scaling")]
    layer = LlamaConfig(**{name: getattr(like, name) for name in names if hasattr(like, name)})
    return layer, int(layer.num_hidden_layers)


def _dflash(
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    layer: LlamaConfig,
    num_layers: int,
    draft_vocab_size: int,
    weights: dict[str, Tensor],
) -> DFlashHead:
    is_dspark = any("dspark" in str(config.get(name, "")).lower() for name in ("architectures", _SPECULATORS)) or (
        fields.get("projector_type") == "dspark"
    )
    markov_rank = int(fields["markov_rank"]) if is_dspark else 0
    kind = fields.get("markov_head_type") or "vanilla"
    if markov_rank and kind not in ("vanilla", "gated"):
        raise ModelUnsupported(f"heads with markov_head_type {kind!r} are not read")
    # Configurations of vLLM's speculators say so where they mean it.
    from_anchor = bool(fields.get("sample_from_anchor", is_dspark and _SPECULATORS not in config))
    num_rows = int(fields["block_size"])
    layers = dflash_feature_layers(config)
    if not layers:
        raise KeyError("target_layer_ids")
    if num_rows <= (not from_anchor):
        raise ModelUnsupported(f"a head with block_size {num_rows} predicts no token")
    if is_dspark:
        weights.pop("mask_embedding", None)  # a placeholder there
    return DFlashHead(
        DFlashConfig(
            layer,
            num_layers,
            int(fields.get("target_hidden_size") or layer.hidden_size),
            len(layers),
            draft_vocab_size,
            num_rows if from_anchor else num_rows - 1,
            _mask_token_id(fields),
            _EMBEDDING in weights,
            kinds=tuple(_kind(fields, number) for number in range(num_layers)),
            predicts_from_anchor=from_anchor,
            embedding_scale=float(fields.get("input_embedding_scale") or 1.0),
            has_mask_embedding="mask_embedding" in weights,
            markov_rank=markov_rank,
            is_gated=kind == "gated",
        )
    )


def _kind(fields: Mapping[str, Any], number: int) -> LayerKind:
    """Return how the rows of a block attend in a layer; where nothing else is said, causally in a sliding one."""
    types = fields.get("layer_types") or ()
    is_typed = number < len(types) and types[number] == "sliding_attention"
    is_sliding = is_typed or (bool(fields.get("use_swa")) and "sliding_attention" not in types)
    said = [fields[name] for name in ("is_causal", "causal") if fields.get(name) is not None]
    is_causal = bool(said[0]) if said else is_typed and not fields.get("sliding_window_non_causal")
    if not is_sliding:
        return LayerKind(is_causal, None)
    window = fields.get("swa_window_size") or fields.get("sliding_window")
    if not window:
        raise KeyError("sliding_window")
    return LayerKind(is_causal, int(window))


def _peagle(
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    layer: LlamaConfig,
    num_layers: int,
    draft_vocab_size: int,
    weights: dict[str, Tensor],
) -> PEagleHead:
    for name in list(weights):
        weights[_own_name(name)] = weights.pop(name)
    mask = weights.get("mask_hidden")
    if mask is None:
        raise ModelUnsupported("the head lacks the weight mask_hidden")
    weights["mask_hidden"] = mask.reshape(1, -1)
    target_hidden_size = int(fields.get("target_hidden_size") or layer.hidden_size)
    return PEagleHead(
        PEagleConfig(
            layer,
            num_layers,
            target_hidden_size,
            mask.numel() // target_hidden_size,
            draft_vocab_size,
            _depth(config, fields),
            _mask_token_id(fields),
            _EMBEDDING in weights,
            norm_before_residual=bool(fields.get("norm_before_residual", False)),
        )
    )


def _depth(config: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    """Return the number of tokens that a P-EAGLE head predicts."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    given = [methods[0].get("speculative_tokens"), *(fields.get(name) for name in ("num_depths", "para_depths"))]
    depth = next((int(item) for item in given if item), _DEFAULT_DEPTH)
    if depth < 1:
        raise ModelUnsupported(f"a head with speculative_tokens {depth} predicts no token")
    return depth


def _mask_token_id(fields: Mapping[str, Any]) -> int:
    found = [fields[name] for name in _MASK_TOKENS if fields.get(name) is not None]
    if not found:
        raise KeyError(" or ".join(_MASK_TOKENS))
    return int(found[0])


def _own_name(name: str) -> str:
    part, _, rest = name.partition(".")
    number, _, weight = rest.partition(".")
    if part != "layers" or not number.isdigit():
        return name
    return f"midlayer.{weight}" if number == "0" else f"further.{int(number) - 1}.{weight}"
