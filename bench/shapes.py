"""Random weights in the shapes of known models: the cost of a pass does not depend on the values of the weights."""

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from outrider.cache import cache_dir
from outrider.errors import InvalidArgument

_LLAMA_3: Final[Mapping[str, Any]] = {
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
_TINY: Final[Mapping[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    # Llama 3.1 8B and Llama 3.2 1B.
    "8b": {**_LLAMA_3}
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "1b": {**_LLAMA_3}
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    # A tenth of `1b`, with its vocabulary: a pass reads a tenth of the bytes.
    "1b-draft": {**_LLAMA_3}
    | {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 14,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    # A tenth of the embedded model, with its vocabulary: most of it is the output layer.
    "13m": {**_TINY}
    | {
        "vocab_size": 49152,
        "hidden_size": 256,
        "intermediate_size": 768,
        "tie_word_embeddings": True,
    },
    "tiny": _TINY,
}
"""Llama configurations by name; one with the vocabulary of a larger one can be its draft."""

_FORMAT: Final = 1
_NOISE_LEN: Final = (1 << 22) + 3
_SCALE: Final = 0.02


def ensure_shape(name: str) -> Path:
    """Return a folder with bfloat16 random weights of a shape; write it first if needed.

    It has no tokenizer. The weights of `8b` have 16 GB.

    Raises:
        InvalidArgument: there is no shape with this name.
    """
    if name not in SHAPES:
        raise InvalidArgument(f"{name!r} is not a shape; the shapes are {', '.join(SHAPES)}", "model")
    folder = cache_dir() / "shapes" / f"{name}-{_FORMAT}"
    if not folder.is_dir():
        print(f"writing random weights of shape {name} (once) to {folder}", file=sys.stderr, flush=True)
        _write(LlamaConfig(**SHAPES[name]), folder)
    return folder


def _write(config: LlamaConfig, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        random_model(config).save_pretrained(scratch)
        # A rename is atomic: other processes see a complete folder or none. If one exists, it has equal content.
        if not folder.is_dir():
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def random_model(config: LlamaConfig) -> PreTrainedModel:
    """Return a random bfloat16 model of this shape; norm weights are 1, so that activations stay bounded."""
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = factory.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    # Sampling 8 billion weights individually would take minutes.
    noise = (torch.randn(_NOISE_LEN, generator=torch.Generator().manual_seed(0)) * _SCALE).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                _fill(parameter.view(-1), noise)
    return model


def _fill(flat: torch.Tensor, noise: torch.Tensor) -> None:
    for start in range(0, len(flat), len(noise)):
        part = flat[start : start + len(noise)]
        part.copy_(noise[: len(part)])
