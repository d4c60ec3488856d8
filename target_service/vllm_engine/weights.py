"""Fingerprints of a checkpoint's weights by samples of its files, since vLLM reshapes weights as it loads them."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

_NUM_SAMPLES: Final = 64
_HEADER_LEN_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100 << 20
_SAMPLE_BYTES: Final = 64
_DTYPES: Final[Mapping[str, torch.dtype]] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"
_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pt")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a safetensors file; its first byte is at `offset`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def files_fingerprint(folder: Path, identity: str) -> str:
    """Return a SHA-256, in hexadecimal, of `identity` and of samples of all weight files of a checkpoint."""
    digest = hashlib.sha256(identity.encode())
    for path in sorted(item for item in folder.iterdir() if item.suffix in _SUFFIXES):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(_NUM_SAMPLES):
                file.seek(place * size // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def weights_fingerprint(folder: Path, *, ties_head: bool) -> str:
    """Return the fingerprint that `outrider.lm.fingerprint.weights_fingerprint` gives a checkpoint's model.

    It identifies the target that a draft was made for. Empty where it cannot be told from the files: they are no
    safetensors, or their weights are quantised.

    Args:
        folder: of the checkpoint.
        ties_head: whether the output layer's weights are the embedding's.
    """
    tensors = dict(_tensors(folder))
    if not tensors or any(tensor.dtype not in _DTYPES for tensor in tensors.values()):
        return ""
    if ties_head and _HEAD not in tensors and _EMBEDDING in tensors:
        tensors[_HEAD] = tensors[_EMBEDDING]
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.shape}".encode())
        digest.update(_samples(tensor).to(torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()


def _tensors(folder: Path) -> Iterator[tuple[str, _Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(_HEADER_LEN_BYTES), "little")
            header = _header(file, header_len)
        for name, about in header.items():
            if name == "__metadata__":
                continue
            start, end = about["data_offsets"]
            offset = _HEADER_LEN_BYTES + header_len + start
            yield name, _Tensor(path, about["dtype"], tuple(about["shape"]), offset, end - start)


def _header(file: BinaryIO, length: int) -> dict[str, Any]:
    if length > _MAX_HEADER_BYTES:
        return {}
    found: dict[str, Any] = json.loads(file.read(length))
    return found


def _samples(tensor: _Tensor) -> torch.Tensor:
    """Return at most 64 evenly spaced values."""
    dtype = _DTYPES[tensor.dtype]
    num = tensor.num_bytes // dtype.itemsize
    places: Sequence[int] = range(0, num, max(1, num // _NUM_SAMPLES))[:_NUM_SAMPLES]
    data = bytearray()
    with tensor.path.open("rb") as file:
        for place in places:
            file.seek(tensor.offset + place * dtype.itemsize)
            data += file.read(dtype.itemsize)
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
