"""Checkpoints of EAGLE-3, block and Medusa heads in the published layouts, with a manifest that identifies the target.

A folder has `config.json` and `model.safetensors` (or a published `pytorch_model.bin`), and, if Outrider wrote it,
`outrider_draft.json`, the manifest. The weights of EAGLE-3 are named `fc`, `midlayer.*`, `norm`, `lm_head`, with the
maps `d2t` and `t2d` (SGLang's layout); `layers.0.*` instead of `midlayer.*` is read too (vLLM's speculators).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from outrider.errors import ModelUnsupported
from outrider.lm.heads.block import BlockConfig, BlockHead
from outrider.lm.heads.eagle3 import Eagle3Config, Eagle3Head, usual_feature_layers
from outrider.lm.heads.files import (
    OUTPUT_LAYER,
    OutputRows,
    add_output_layer,
    fill,
    named_feature_layers,
    read_config,
    read_weights,
    take_vocabulary,
)
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.vocabulary import DraftVocabulary

_MANIFEST: Final = "outrider_draft.json"
_FORMAT: Final = 1
_BLOCK: Final = "OutriderBlockHead"


@dataclass(frozen=True)
class DraftManifest:
    """The description of a draft and of the target that it was trained for.

    Attributes:
        method: layers, eagle3, block or medusa.
        target: name of the target, as given to `outrider distill`.
        target_fingerprint: SHA-256 of the target's weights; see `weights_fingerprint`.
        tokenizer_fingerprint: SHA-256 of the vocabulary; see `vocabulary_fingerprint`.
        hidden_size: H of the target.
        feature_layers: target layers whose features the draft reads; see `features`.
        depth: number of consecutive tokens that it was trained to predict.
        trimmed: whether the output layer, which is the target's, is left out of the checkpoint.
    """

    method: str
    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    hidden_size: int
    feature_layers: tuple[int, ...]
    depth: int
    trimmed: bool

    def save(self, folder: Path) -> None:
        """Write the manifest into the draft's folder."""
        (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n")


def load_manifest(folder: Path) -> DraftManifest | None:
    """Return the manifest of a folder; None for a draft that Outrider did not write.

    Raises:
        ModelUnsupported: the manifest is damaged or of another version.
    """
    path = folder / _MANIFEST
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text())
        if fields.pop("format") != _FORMAT:
            raise ModelUnsupported(f"{path} has a format that this version does not support")
        fields["feature_layers"] = tuple(fields["feature_layers"])
        return DraftManifest(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnsupported(f"{path} is damaged: {error}") from error


def save_eagle3(folder: Path, head: Eagle3Head, vocabulary: DraftVocabulary, manifest: DraftManifest) -> None:
    """Write an EAGLE-3 head in bfloat16."""
    _save_eagle3(folder, head, vocabulary, manifest, {"architectures": ["LlamaForCausalLMEagle3"]})


def _save_eagle3(
    folder: Path, head: Eagle3Head, vocabulary: DraftVocabulary, manifest: DraftManifest, more: Mapping[str, Any]
) -> None:
    weights = {name: item.to(torch.bfloat16) for name, item in head.state_dict().items()}
    config = {
        **head.config.layer.to_diff_dict(),
        **more,
        "model_type": "llama",
        "draft_vocab_size": len(vocabulary),
        "target_hidden_size": head.config.target_hidden_size,
        "norm_before_residual": head.config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(manifest.feature_layers),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    _save(folder, config, weights, vocabulary, manifest)


def load_eagle3(folder: Path, output_rows: OutputRows | None = None) -> tuple[Eagle3Head, DraftVocabulary]:
    """Return a published or trained EAGLE-3 head and its vocabulary, with weights in bfloat16.

    Args:
        folder: folder with configuration and weights.
        output_rows: source of the output layer of a trimmed head.

    Raises:
        ModelUnsupported: a file, weight or map is missing or has the wrong shape; the message names it.
    """
    _, shape, weights, vocabulary = _read_eagle3(folder)
    head = Eagle3Head(shape).to(torch.bfloat16)
    add_output_layer(weights, vocabulary, output_rows)
    fill(head, weights)
    return head, vocabulary


def _read_eagle3(folder: Path) -> tuple[dict[str, Any], Eagle3Config, dict[str, Tensor], DraftVocabulary]:
    """Return configuration, shape, weights without embeddings, and vocabulary of a checkpoint."""
    config = read_config(folder)
    layer_fields = config.get("transformer_layer_config", config)
    layer = LlamaConfig(**{key: value for key, value in layer_fields.items() if key not in ("architectures", "dtype")})
    weights = {_own_name(name): item for name, item in read_weights(folder).items()}
    vocabulary = take_vocabulary(weights, layer.vocab_size, config.get("draft_vocab_size"))
    shape = Eagle3Config(
        layer,
        config.get("target_hidden_size") or layer.hidden_size,
        len(vocabulary),
        bool(config.get("norm_before_residual", False)),
    )
    weights.pop("embed_tokens.weight", None)
    return config, shape, weights, vocabulary


def feature_layers_of(folder: Path, num_layers: int) -> tuple[int, ...]:
    """Return the target layers whose inputs a head fuses; EAGLE-3's default ones if its configuration names none.

    Args:
        folder: folder with the configuration.
        num_layers: decoder layers of the target.

    Raises:
        ModelUnsupported: the target has no such layer.
    """
    layers = named_feature_layers(read_config(folder)) or usual_feature_layers(num_layers)
    if not all(0 <= layer <= num_layers for layer in layers):
        named = ", ".join(map(str, layers))
        raise ModelUnsupported(f"{folder} takes the features of target layers {named}, the target has {num_layers}")
    return layers


def save_block(folder: Path, head: BlockHead, vocabulary: DraftVocabulary, manifest: DraftManifest) -> None:
    """Write a block head in bfloat16: an EAGLE-3 checkpoint with further weights."""
    block = {"architectures": [_BLOCK], "block_size": head.block.block_size, "transition_rank": head.block.rank}
    _save_eagle3(folder, head, vocabulary, manifest, block)


def load_block(folder: Path, output_rows: OutputRows | None = None) -> tuple[BlockHead, DraftVocabulary]:
    """Return a block head and its vocabulary, in bfloat16; arguments and errors as of `load_eagle3`."""
    config, shape, weights, vocabulary = _read_eagle3(folder)
    try:
        block = BlockConfig(shape, config["block_size"], config["transition_rank"])
    except KeyError as error:
        raise ModelUnsupported(f"{folder / 'config.json'} has no {error.args[0]}") from error
    head = BlockHead(block).to(torch.bfloat16)
    add_output_layer(weights, vocabulary, output_rows)
    fill(head, weights)
    return head, vocabulary


def load_eagle3_or_block(folder: Path, output_rows: OutputRows | None = None) -> tuple[Eagle3Head, DraftVocabulary]:
    """Return a head that drafts from the target's features: an EAGLE-3 head, or a block head if the folder has one.

    Arguments and errors as of `load_eagle3`.
    """
    load = load_block if _BLOCK in (read_config(folder).get("architectures") or ()) else load_eagle3
    return load(folder, output_rows)


def save_medusa(folder: Path, heads: MedusaHeads, vocabulary: DraftVocabulary, manifest: DraftManifest) -> None:
    """Write Medusa's heads in bfloat16."""
    weights = {_published_name(name): item.to(torch.bfloat16) for name, item in heads.state_dict().items()}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": 1,
        "hidden_size": manifest.hidden_size,
        "vocab_size": vocabulary.target_size,
        "draft_vocab_size": len(vocabulary),
    }
    _save(folder, config, weights, vocabulary, manifest)


def load_medusa(folder: Path, output_rows: OutputRows | None = None) -> tuple[MedusaHeads, DraftVocabulary]:
    """Return Medusa heads and their vocabulary, in bfloat16; arguments and errors as of `load_eagle3`."""
    config = read_config(folder)
    weights = {_read_name(name): item for name, item in read_weights(folder).items()}
    vocabulary = take_vocabulary(weights, config.get("vocab_size", 0), config.get("draft_vocab_size"))
    try:
        heads = MedusaHeads(config["hidden_size"], config["medusa_num_heads"], len(vocabulary)).to(torch.bfloat16)
    except KeyError as error:
        raise ModelUnsupported(f"{folder / 'config.json'} has no {error.args[0]}") from error
    add_output_layer(weights, vocabulary, output_rows)
    fill(heads, weights)
    return heads, vocabulary


def save_vocabulary(folder: Path, vocabulary: DraftVocabulary) -> None:
    """Write the vocabulary map into the folder of a transformers checkpoint."""
    save_file({"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, folder / "vocabulary.safetensors")


def load_vocabulary(folder: Path) -> DraftVocabulary | None:
    """Return the vocabulary map from the folder of a transformers checkpoint; None if there is none."""
    path = folder / "vocabulary.safetensors"
    if not path.exists():
        return None
    maps = load_file(path)
    return DraftVocabulary.from_maps(maps["d2t"], maps["t2d"])


def _save(
    folder: Path,
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    vocabulary: DraftVocabulary,
    manifest: DraftManifest,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if manifest.trimmed:
        del weights[OUTPUT_LAYER]
    maps = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    contiguous = {name: item.cpu().contiguous() for name, item in weights.items()}
    save_file({**contiguous, **maps}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    manifest.save(folder)


def _own_name(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _published_name(name: str) -> str:
    parts = name.split(".")
    return f"{parts[1]}.0.{'.'.join(parts[2:])}" if parts[0] == "heads" else name


def _read_name(name: str) -> str:
    parts = name.split(".")
    return f"heads.{parts[0]}.{'.'.join(parts[2:])}" if parts[0].isdigit() and parts[1] == "0" else name
