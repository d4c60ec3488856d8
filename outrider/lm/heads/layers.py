"""The parts of a head's Llama layer, without transformers' own, whose import takes longer than the rest of a start."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps rows [B, T, H], for their device and dtype, and positions, int64 [B, T], to cosines and sines [B, T, dim]."""


class RmsNorm(nn.Module):
    """The norm of a Llama layer (Zhang and Sennrich 2019, equation 4), computed in float32 whatever the rows are in.

    PyTorch's own warns where rows and weight differ in their type, as they do in training.

    Args:
        width: numbers of a row.
        eps: that is added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """Return the normalised rows, [..., H], in the type that rows and weight have together."""
        return self.weight * functional.rms_norm(rows.float(), self.weight.shape, eps=self.eps).to(rows.dtype)


class GatedMlp(nn.Module):
    """The gated linear unit of a Llama layer (Shazeer 2020): down(act(gate(x)) * up(x)).

    The names of the weights are those of published heads.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, num_inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, num_inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, num_inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(num_inner, width, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, rows: Tensor) -> Tensor:
        """Return the outputs of rows: both [..., H]."""
        outputs: Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return outputs


class RotaryEmbedding:
    """Angles of positions (Su et al. 2021, RoFormer, equation 15): position / base ** (2 i / dim).

    It is no module, so that a head in bfloat16 has its frequencies in float32, as in training: of a rounded
    frequency of 0.7 the angle is off by more than a tenth of a radian after 100 positions.

    Args:
        dim: numbers of a head, even.
        base: of the frequencies.
    """

    def __init__(self, dim: int, base: float) -> None:
        self._frequencies = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))

    def __call__(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions; see `Rotary`."""
        half = positions[..., None].float() * self._frequencies.to(positions.device)
        angles = torch.cat([half, half], dim=-1)
        return angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)


def rotary_embedding(config: LlamaConfig) -> Rotary:
    """Return the rotary embedding of a layer: transformers' own for all kinds but the usual one."""
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if rope["rope_type"] == "default":
        return RotaryEmbedding(config.head_dim or config.hidden_size // config.num_attention_heads, rope["rope_theta"])
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    embedding = LlamaRotaryEmbedding(config)
    # Not part of the head either; see above.
    return lambda rows, positions: embedding.to(rows.device)(rows, positions)


def rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys, [B, heads, T, dim], rotated by the cosines and sines of their rows, [B, T, dim] each."""
    cosine, sine = (part.unsqueeze(1) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine
