"""The weights that a draft head shares with its target, read from the target's files without loading the target."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from outrider.errors import ModelUnsupported
from outrider.lm import embedded
from outrider.lm.hub import check_available
from outrider.lm.tokenizer import TOKENIZER_NAME

_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_OUTPUTS: Final = ("lm_head.weight", "embed_out.weight", "output.weight")
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True)
class SharedWeights:
    """The input embeddings, output layer and limits of a target.

    Attributes:
        embedding: input embeddings [V, H].
        output_layer: weights of the output layer [V, H]; the same tensor if they are tied.
        num_layers: number of decoder layers.
        max_len: longest text, in tokens; None if unlimited.
        eos_token_ids: end-of-text token ids.
        tokenizer: tokenizer.json; None where there is none.
    """

    embedding: Tensor
    output_layer: Tensor
    num_layers: int
    max_len: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer: str | None = None


def read_shared(target: str) -> SharedWeights:
    """Read the shared weights of a target.

    Args:
        target: a folder, a hub id, or `embedded`.

    Raises:
        ModelUnsupported: its files are missing, or have no such weights.
    """
    source = str(embedded.ensure_embedded()) if target == embedded.NAME else target
    try:
        check_available(source)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"cannot read the target {target}: {error.message}") from error
    try:
        text: Any = AutoConfig.from_pretrained(source).get_text_config()
        files = _files(source)
        embedding = _find(files, _EMBEDDINGS)
        output = embedding if getattr(text, "tie_word_embeddings", False) else _find(files, _OUTPUTS)
        output = embedding if output is None else output
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelUnsupported(f"cannot read the target {target}: {str(error).splitlines()[0]}") from error
    if embedding is None or output is None:
        raise ModelUnsupported(f"the files of target {target} have no input embeddings under a known name")
    eos = text.eos_token_id
    return SharedWeights(
        embedding=embedding,
        output_layer=output,
        num_layers=text.num_hidden_layers,
        max_len=getattr(text, "max_position_embeddings", None),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        tokenizer=_tokenizer(source),
    )


def _tokenizer(source: str) -> str | None:
    path = cached_file(source, TOKENIZER_NAME, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path).read_text()


def _files(source: str) -> dict[str, Path]:
    """Return the file of each weight by name."""
    index = cached_file(source, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        wanted = {name: file for name, file in names.items() if name.endswith((*_EMBEDDINGS, *_OUTPUTS))}
        return {name: _path(source, file) for name, file in wanted.items()}
    path = _path(source, _WEIGHTS)
    with safe_open(path, "pt") as file:
        return dict.fromkeys(file.keys(), path)


def _path(source: str, name: str) -> Path:
    found = cached_file(source, name)
    if found is None:
        raise OSError(f"{source} has no {name}")
    return Path(found)


def _find(files: dict[str, Path], endings: tuple[str, ...]) -> Tensor | None:
    for ending in endings:
        for name, path in files.items():
            if name.endswith(ending):
                with safe_open(path, "pt") as file:
                    weight: Tensor = file.get_tensor(name)
                    return weight
    return None
