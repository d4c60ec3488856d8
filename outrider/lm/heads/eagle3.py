"""EAGLE-3's draft head (Li et al. 2025): one decoder layer over the target's features and its tokens.

The input of column t is the embedding of token t + 1 and the fused features of position t; the output predicts token
t + 2. The target has no features yet for further predictions; the layer's own output at the previous column replaces
them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from outrider.lm.heads.layers import GatedMlp, RmsNorm, rotary_embedding, rotated

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps rotated queries [B, heads, T, dim], keys and values [B, kv_heads, T, dim] of new rows to [B, T, heads * dim].

It stores the keys and values, and masks the stored ones for each row.
"""

EVERY_COLUMN = slice(None)
"""All columns of a text."""

NUM_FEATURES = 3
"""Number of target layers whose features are fused: a low, a middle and a high one."""


@dataclass(frozen=True)
class Eagle3Config:
    """The configuration of a head.

    Attributes:
        layer: configuration of the decoder layer, which is a Llama layer.
        target_hidden_size: width of one feature.
        draft_vocab_size: size of the draft's vocabulary.
        norm_before_residual: whether the residual connection starts after the norm of the fused features.
    """

    layer: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False


class Eagle3Attention(nn.Module):
    """The attention layer, whose input [embedding, feature] is twice as wide as that of a Llama layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or num_heads
        self.head_dim = head_dim = config.head_dim or config.hidden_size // num_heads
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, config.hidden_size, bias=config.attention_bias)

    def project(self, inputs: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, heads, T, dim], rotated keys and values [B, kv_heads, T, dim]."""
        heads = [
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return rotated(heads[0], rotation), rotated(heads[1], rotation), heads[2]


class Eagle3Layer(nn.Module):
    """The decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer = config.layer
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(layer)
        self.mlp = GatedMlp(layer)
        self.input_layernorm = RmsNorm(layer.hidden_size, layer.rms_norm_eps)
        self.hidden_norm = RmsNorm(layer.hidden_size, layer.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(layer.hidden_size, layer.rms_norm_eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the outputs [B, T, H] of new rows.

        Args:
            embeddings: token embeddings [B, T, H].
            hidden: fused features, or outputs of the previous step: [B, T, H].
            rotation: cosine and sine of the rows' positions (rotary embedding).
            attend: attention over these rows and the stored ones.
        """
        query, key, value, residual = self.project(embeddings, hidden, rotation)
        return self.finish(attend(query, key, value), residual)

    def project(
        self, embeddings: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values of new rows (see `Eagle3Attention.project`), and their residual [B, T, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return (*self.self_attn.project(inputs, rotation), residual)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the outputs [B, T, H] of new rows, given what they attended to, [B, T, heads * dim]."""
        hidden = residual + self.self_attn.o_proj(attended)
        outputs: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return outputs


class Eagle3Head(nn.Module):
    """The head: `fc` fuses features, `midlayer` is the decoder layer, `norm` and `lm_head` compute the logits.

    The names of the weights are those of published heads.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.fc = nn.Linear(NUM_FEATURES * config.target_hidden_size, layer.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RmsNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = rotary_embedding(layer)

    def unroll(self, features: Tensor, embeddings: Iterable[Tensor]) -> Iterator[Tensor]:
        """Run several draft steps at every column in parallel (training-time test, Li et al. 2025, section 3.2).

        Args:
            features: features of positions 0 .. T - 1: [B, T, 3 * target_hidden_size].
            embeddings: for each step k, embeddings of tokens k + 1 .. k + T: [B, T, H].

        Yields:
            For each step k, normalised outputs [B, T, H]; `lm_head` of column t predicts token t + k + 2.
        """
        hidden = self.fc(features)
        columns = torch.arange(features.shape[1], device=features.device)[None]
        past: list[tuple[Tensor, Tensor]] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            past.append((key, value))
            return chain_attention(query, past)

        for step, embedded in enumerate(embeddings):
            rotation = self.rotary(hidden, columns + step)
            hidden = self.midlayer(embedded, hidden, rotation, attend)
            yield self.norm(hidden)


def usual_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs are fused by default: a low, a middle and a high one of `num_layers`."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


def chain_attention(query: Tensor, past: list[tuple[Tensor, Tensor]], columns: slice = EVERY_COLUMN) -> Tensor:
    """Return the attention outputs of one draft step at N of T columns.

    Each column attends to the columns of the first step up to its own, and to its own column of the later steps.

    Args:
        query: of these columns: [B, heads, N, dim].
        past: keys and values of each step so far, this one included: of the first step [B, kv_heads, T, dim], of the
            later ones [B, kv_heads, N, dim].
        columns: which N of the T columns.

    Returns:
        [B, N, heads * dim].
    """
    batch, _, num, dim = query.shape
    grouped = query.reshape(batch, past[0][0].shape[1], -1, num, dim) / math.sqrt(dim)
    keys, values = zip(*((key.unsqueeze(2), value.unsqueeze(2)) for key, value in past), strict=True)
    length = past[0][0].shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)[columns]
    first = (grouped @ keys[0].transpose(-1, -2)).masked_fill(later, -torch.inf)
    own = [(grouped * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat([first, *own], dim=-1).float().softmax(-1).to(values[0].dtype)
    output: Tensor = weights[..., :length] @ values[0]
    for step, value in enumerate(values[1:]):
        output = output + weights[..., length + step, None] * value
    return output.flatten(1, 2).transpose(1, 2).flatten(2)
