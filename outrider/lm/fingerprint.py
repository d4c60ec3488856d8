"""Fingerprints of models: hashes of architecture and weights."""

import hashlib
from typing import Final

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_SAMPLE_LEN: Final = 64


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a SHA-256, in hexadecimal, of the architecture and a sample of every weight, which is cheap to compute."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for sample in _samples(weight):
            digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a SHA-256, in hexadecimal, of a sample of every weight in bfloat16; it does not depend on the dtype.

    It identifies the target that a draft was trained for. Quantised weights have another fingerprint.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        for sample in _samples(weight):
            digest.update(sample.to(torch.bfloat16).float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _samples(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return at most 64 evenly spaced values of each plain tensor of a weight."""
    flat = [part.detach().reshape(-1) for part in _plain_parts(weight)]
    return [part[:: max(1, part.numel() // _SAMPLE_LEN)][:_SAMPLE_LEN] for part in flat]


def _plain_parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of a weight: several if it is quantised; parts of all ranks joined if it is split."""
    if isinstance(weight, DTensor):
        return [weight.full_tensor()]
    parts, _ = getattr(weight, "__tensor_flatten__", lambda: ((), None))()
    if parts:
        return [plain for name in parts for plain in _plain_parts(getattr(weight, name))]
    return [weight]
