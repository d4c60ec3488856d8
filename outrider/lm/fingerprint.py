"""What tells one model from another: its architecture and its weights."""

import hashlib
from typing import Final

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_SAMPLE_LEN: Final = 64


def model_fingerprint(model: PreTrainedModel) -> str:
    """Hashes the architecture and a sample of every weight: cheap, and different for any two models met in practice."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for sample in _samples(weight):
            digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hashes a sample of every weight in bfloat16: the same whichever dtype the weights are served in.

    It names the model that a draft was made for. Quantised weights are others.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        for sample in _samples(weight):
            digest.update(sample.to(torch.bfloat16).float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _samples(weight: torch.Tensor) -> list[torch.Tensor]:
    """Returns a few numbers of everything that a weight consists of."""
    flat = [part.detach().reshape(-1) for part in _plain_parts(weight)]
    return [part[:: max(1, part.numel() // _SAMPLE_LEN)][:_SAMPLE_LEN] for part in flat]


def _plain_parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """Returns what a weight consists of: several tensors where it is quantised, all ranks' parts as one if split."""
    if isinstance(weight, DTensor):
        return [weight.full_tensor()]
    parts, _ = getattr(weight, "__tensor_flatten__", lambda: ((), None))()
    if parts:
        return [plain for name in parts for plain in _plain_parts(getattr(weight, name))]
    return [weight]
