"""EAGLE-3's draft head (Li et al. 2025): one decoder layer over the target's features and the tokens it has said.

At column t stand the embedding of token t + 1 and the fused features of position t; the output guesses token t + 2. A
further guess has no features yet: the layer's own output at the column before stands in for them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotated queries [B, heads, T, dim], keys and values [B, kv_heads, T, dim] of new rows to outputs [B, T, heads * dim].

It keeps the keys and values, and knows which of those kept each row may look at.
"""

NUM_FEATURES = 3
"""Target layers whose outputs are fused: a low, a middle and a high one."""


@dataclass(frozen=True)
class Eagle3Config:
    """What a head is made of.

    Attributes:
        layer: width, heads and positions of the decoder layer, as a Llama layer has them.
        target_hidden_size: width of one feature.
        draft_vocab_size: tokens that the head can say.
        norm_before_residual: whether the fused features are normalised before the residual connection too.
    """

    layer: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False


class Eagle3Attention(nn.Module):
    """Attention over [embedding, feature], twice as wide as a Llama layer's input."""

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
        """Returns rotated queries [B, heads, T, dim], rotated keys and values [B, kv_heads, T, dim]."""
        heads = [
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        query, key = apply_rotary_pos_emb(heads[0], heads[1], *rotation)
        return query, key, heads[2]


class Eagle3Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer = config.layer
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(layer)
        self.mlp = LlamaMLP(layer)  # type: ignore[no-untyped-call]
        self.input_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Returns the outputs [B, T, H] of new rows.

        Args:
            embeddings: of the tokens: [B, T, H].
            hidden: fused features, or the outputs of the step before: [B, T, H].
            rotation: cosine and sine of the rows' positions.
            attend: the attention over these rows and those before.
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended = attend(*self.self_attn.project(inputs, rotation))
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Head(nn.Module):
    """The whole head: `fc` fuses features, `midlayer` runs them, `norm` and `lm_head` say what follows.

    Names of weights are those of published heads.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.fc = nn.Linear(NUM_FEATURES * config.target_hidden_size, layer.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)

    def unroll(self, features: Tensor, embeddings: Iterable[Tensor]) -> Iterator[Tensor]:
        """Runs the head as drafting does, step after step, at every column at once (training-time test).

        Args:
            features: of positions 0 .. T - 1: [B, T, 3 * target_hidden_size].
            embeddings: for step k those of tokens k + 1 .. k + T: [B, T, H].

        Yields:
            For step k the normalised outputs [B, T, H]; `lm_head` of column t guesses token t + k + 2.
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

    def run(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Runs new rows, of one session or of several.

        Args:
            hidden: for a column what `fc` makes of the features, for a drafted token the output of its parent: [N, H].
            embeddings: of the tokens: [N, H].
            positions: int64 [N].
            attend: see there; it gets the rows as those of one sequence, B = 1.

        Returns:
            [N, H]; `lm_head` takes it through `norm`.
        """
        rotation = self.rotary(hidden[None], positions[None])
        outputs: Tensor = self.midlayer(embeddings[None], hidden[None], rotation, attend)[0]
        return outputs


def usual_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers whose inputs are fused by default: a low, a middle and a high one, of so many."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


def chain_attention(query: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of a chain's step at every column: to the first step's columns up to its own, and to its own chain.

    Args:
        query: [B, heads, T, dim].
        past: keys and values [B, kv_heads, T, dim] of every step so far, this one included.

    Returns:
        [B, T, heads * dim].
    """
    batch, _, length, dim = query.shape
    grouped = query.reshape(batch, past[0][0].shape[1], -1, length, dim) / math.sqrt(dim)
    keys, values = zip(*((key.unsqueeze(2), value.unsqueeze(2)) for key, value in past), strict=True)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    first = (grouped @ keys[0].transpose(-1, -2)).masked_fill(later, -torch.inf)
    own = [(grouped * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat([first, *own], dim=-1).float().softmax(-1).to(values[0].dtype)
    output: Tensor = weights[..., :length] @ values[0]
    for step, value in enumerate(values[1:]):
        output = output + weights[..., length + step, None] * value
    return output.flatten(1, 2).transpose(1, 2).flatten(2)
