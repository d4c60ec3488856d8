"""Reading the files of a draft head: its configuration, weights and vocabulary, in whichever published layout."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import ModelUnsupported
from outrider.lm.heads.vocabulary import DraftVocabulary

OUTPUT_LAYER: Final = "lm_head.weight"
"""The name of the output layer's weight."""

OutputRows = Callable[[Tensor], Tensor]
"""Returns the rows of the target's output layer for token ids, int64 [n]: [n, H]; for heads saved without them."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a folder; raise `ModelUnsupported` where it cannot be read."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnsupported(f"{path} has no fields")
    return config


def named_feature_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the target layers whose inputs a head fuses, as its configuration names them; empty where it does not.

    SGLang (`eagle_config`) and the authors of DFlash have the layers whose outputs they are, which are one lower.
    """
    name, eagle, dflash = "eagle_aux_hidden_state_layer_ids", "eagle_config", "dflash_config"
    inputs = config.get(name) or config.get("aux_hidden_state_layer_ids")
    outputs = (config.get(eagle) or {}).get(name) or (config.get(dflash) or config).get("target_layer_ids")
    return tuple(inputs or [layer + 1 for layer in outputs or ()])


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder by name; raise `ModelUnsupported` where there are none that can be read."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.exists():
            return load_file(safe)
        return dict(torch.load(pickled, map_location="cpu", weights_only=True))
    except (OSError, SafetensorError, pickle.UnpicklingError) as error:
        raise ModelUnsupported(f"{folder} has no weights that can be read: {error}") from error


def take_vocabulary(weights: dict[str, Tensor], target_size: int, draft_size: int | None) -> DraftVocabulary:
    """Return the vocabulary of a head, and take its maps out of the weights.

    Args:
        weights: with the maps `d2t` and `t2d`, or with neither where the head has the whole vocabulary.
        target_size: V, size of the target's vocabulary.
        draft_size: that of the head's, as configured; None for the whole vocabulary.

    Raises:
        ModelUnsupported: a map is missing.
        InvalidArgument: the maps contradict each other.
    """
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if d2t is None and t2d is None and draft_size in (None, target_size):
        return DraftVocabulary(torch.arange(target_size), target_size)
    if d2t is None or t2d is None:
        missing = "d2t" if d2t is None else "t2d"
        raise ModelUnsupported(f"the head has {draft_size} of {target_size} tokens, but its map {missing} is missing")
    return DraftVocabulary.from_maps(d2t, t2d)


def add_output_layer(weights: dict[str, Tensor], vocabulary: DraftVocabulary, output_rows: OutputRows | None) -> None:
    """Add the target's output layer to the weights where they have none; raise `ModelUnsupported` if there is none."""
    if OUTPUT_LAYER in weights:
        return
    if output_rows is None:
        raise ModelUnsupported(
            "the head was saved without its output layer, and the target's output layer is not available"
        )
    try:
        weights[OUTPUT_LAYER] = output_rows(vocabulary.token_ids)
    except IndexError as error:
        last = int(vocabulary.token_ids[-1])
        raise ModelUnsupported(f"the head predicts the token {last}, which the target has not") from error


def fill(head: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load a head's weights, and freeze it; raise `ModelUnsupported` for one that is missing or has another shape."""
    own = head.state_dict()
    for name, item in own.items():
        if name not in weights:
            raise ModelUnsupported(f"the head lacks the weight {name}")
        if weights[name].shape != item.shape:
            found, wanted = list(weights[name].shape), list(item.shape)
            raise ModelUnsupported(
                f"the head's weight {name} has shape {found}, but its configuration requires {wanted}"
            )
    head.load_state_dict({name: weights[name].to(item.dtype) for name, item in own.items()})
    head.requires_grad_(False).eval()
