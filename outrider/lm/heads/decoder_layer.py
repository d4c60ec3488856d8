"""A decoder layer of heads in the published layouts, as Llama's or Qwen3's, over rows of all sessions at once."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from outrider.lm.heads.layers import GatedMlp, RmsNorm, rotated


class HeadAttention(nn.Module):
    """The projections of an attention layer; the names of the weights are the published ones.

    Args:
        config: of the layer.
        has_head_norms: whether queries and keys are normalised, each head by itself, as in Qwen3.
    """

    def __init__(self, config: LlamaConfig, *, has_head_norms: bool) -> None:
        super().__init__()
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or num_heads
        self.head_dim = head_dim = config.head_dim or config.hidden_size // num_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=bias)
        if has_head_norms:
            self.q_norm = RmsNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RmsNorm(head_dim, config.rms_norm_eps)
        self._has_head_norms = has_head_norms

    def queries(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the rotated queries of rows [N, H]: [heads, N, dim]."""
        heads = self._heads(self.q_proj(rows))
        return _turned(self.q_norm(heads) if self._has_head_norms else heads, rotation)

    def keys_and_values(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values of rows [N, H]: [kv_heads, N, dim]."""
        heads = self._heads(self.k_proj(rows))
        keys = _turned(self.k_norm(heads) if self._has_head_norms else heads, rotation)
        return keys, self._heads(self.v_proj(rows))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, self.head_dim).transpose(0, 1)


class DecoderLayer(nn.Module):
    """The layer.

    Args:
        config: of the layer.
        has_head_norms: see `HeadAttention`.
    """

    def __init__(self, config: LlamaConfig, *, has_head_norms: bool) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, has_head_norms=has_head_norms)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def project(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [heads, N, dim], keys and values [kv_heads, N, dim] of rows, [N, H].

        Args:
            rows: outputs of the layer before.
            rotation: cosines and sines of their positions: [N, dim].
        """
        normed = self.input_layernorm(rows)
        return self.self_attn.queries(normed, rotation), *self.self_attn.keys_and_values(normed, rotation)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the outputs of rows, [N, H], given what they attended to, [N, heads * dim], and themselves."""
        hidden = residual + self.self_attn.o_proj(attended)
        outputs: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return outputs


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return what rows attended to: [T, heads * dim].

    Args:
        query: of the rows: [heads, T, dim].
        keys: of slots: [slots, kv_heads, dim].
        values: likewise.
        mask: the slots to which each row attends: bool [T, slots]; None for all.
    """
    keys, values = keys[None].transpose(1, 2), values[None].transpose(1, 2)
    num_shared = len(query) // keys.shape[1]
    # The query heads that share keys are rows of one head, which takes less time than `enable_gqa`.
    folded = query.reshape(1, keys.shape[1], -1, query.shape[-1])
    folded_mask = None if mask is None else mask.repeat(num_shared, 1)
    output = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=folded_mask)
    return output.view(query.shape).transpose(0, 1).flatten(1)


def visible(first: int, num: int, *, is_causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Return which slots each of `num` rows, in the slots from `first` on, attends to: bool [num, first + num].

    Args:
        first: slot and position of the first row.
        num: of rows.
        is_causal: whether no row attends to those behind it.
        window: positions that a row attends to, its own included, on either side; None for all.
        device: of the mask.

    Returns:
        None where each row attends to all.
    """
    if not is_causal and window is None:
        return None
    slots = torch.arange(first + num, device=device)
    behind = slots[first:, None] - slots
    seen = behind >= 0 if is_causal else torch.ones_like(behind, dtype=torch.bool)
    return seen if window is None else seen & (behind.abs() < window)


def _turned(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    return rotated(heads[None], (cosine[None], sine[None]))[0]
