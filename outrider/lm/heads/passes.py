"""A pass of an EAGLE-3 head in parts, between which sessions attend and trees grow.

A head is so small that what lies between its products takes as long as they do. So products of one input are one, norms
are one operator each, and rotations are looked up. Compiling them instead was no faster: the way into compiled code and
back takes what it saves.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.lm.heads.block import Transition
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.packed_linear import NativeLinear, packed_kind

_VARYING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest position of a pass."""
_FIRST_POSITIONS = 2048


class HeadPasses:
    """The parts of a head's pass; rows are [N, ...]. See the module.

    Args:
        head: in bfloat16, on its device.
    """

    def __init__(self, head: Eagle3Head) -> None:
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        config = head.config.layer
        # Only what is used is kept, so that the head's own layers are freed with it.
        self._norms = layer.post_attention_layernorm, head.norm
        # Of a token's embedding and of the feature beside it: [2, H].
        self._input_norms = torch.stack([layer.input_layernorm.weight, layer.hidden_norm.weight]).detach()
        self._epsilon = layer.hidden_norm.variance_epsilon
        self._starts_normed = layer.norm_before_residual
        self._rotary = head.rotary
        self._fc = joined(head.fc)
        self._head_dim = attention.head_dim
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads or config.num_attention_heads
        self._act = mlp.act_fn
        self._qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = joined(attention.o_proj)
        self._gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self._down = joined(mlp.down_proj)
        self._output = joined(head.lm_head)
        rope = getattr(config, "rope_parameters", None) or {}
        self._varies = rope.get("rope_type", "default") in _VARYING_ROPE
        self._rotations: tuple[Tensor, Tensor] | None = None

    def fuse(self, features: Tensor) -> Tensor:
        """Return the fused features of positions: [N, H]; `features` are [N, 3 * target_hidden_size]."""
        fused: Tensor = self._fc(features)
        return fused

    def project(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rotated queries [heads, N, dim], rotated keys and values [kv_heads, N, dim], and the residual [N, H].

        Args:
            embeddings: of the rows' tokens: [N, H].
            hidden: the output of `fuse` for a column, the output of the parent for a drafted token: [N, H].
            positions: for the rotary embedding, int64 [N].
        """
        rows = torch.stack([embeddings, hidden], dim=1)
        normed = functional.rms_norm(rows, rows.shape[-1:], eps=self._epsilon) * self._input_norms
        heads = self._qkv(normed.flatten(1)).view(len(rows), -1, self._head_dim).transpose(0, 1)
        num_rotated = self._num_heads + self._num_kv_heads
        cosine, sine = self._rotation(hidden, positions)
        turned = heads[:num_rotated]
        first, second = turned.chunk(2, dim=-1)
        rotated = turned * cosine + torch.cat([-second, first], dim=-1) * sine
        residual = normed[:, 1] if self._starts_normed else hidden
        return rotated[: self._num_heads], rotated[self._num_heads :], heads[num_rotated:], residual

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the outputs of rows, [N, H], given what they attended to, [N, heads * dim]."""
        hidden = residual + self._o(attended)
        gate, up = self._gate_up(_norm(self._norms[0], hidden)).chunk(2, dim=-1)
        outputs: Tensor = hidden + self._down(self._act(gate) * up)
        return outputs

    def logits(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised outputs, [N, H], and the logits of the draft's tokens, [N, D]."""
        states = _norm(self._norms[1], outputs)
        return states, self._output(states)

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions: [N, dim]."""
        if self._varies:
            cosine, sine = self._rotary(hidden[None], positions[None])
            return cosine[0], sine[0]
        end = int(positions.max()) + 1
        if self._rotations is None or len(self._rotations[0]) < end:
            every = torch.arange(max(_FIRST_POSITIONS, 2 * end), device=positions.device)
            cosine, sine = self._rotary(hidden[None], every[None])
            self._rotations = cosine[0], sine[0]
        cosine, sine = self._rotations
        return cosine[positions], sine[positions]


class TransitionPass:
    """The transition of a block head, packed; see `outrider.lm.heads.block`."""

    def __init__(self, transition: Transition) -> None:
        self._token, self._state = joined(transition.token), joined(transition.state)
        self._output = joined(transition.output)

    def states(self, states: Tensor) -> Tensor:
        """Return what states, [R, H], add to a transition: [R, rank]."""
        added: Tensor = self._state(states)
        return added

    def __call__(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Return the additions to the logits, [N, D], after tokens with embeddings [N, H]; of `states` [N, rank]."""
        added: Tensor = self._output(functional.silu(self._token(embeddings) + states))
        return added


def joined(*linears: nn.Linear) -> nn.Module:
    """Return layers with the same input as one layer, packed where that can be (see `packed_linear`).

    The native product has their weights in 8 bits: a draft need not be exact.
    """
    weight = linears[0].weight
    kind = packed_kind() if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" else None
    if kind is NativeLinear:
        # A step reads all weights for a few rows, so that half of the bytes take half of the time.
        return NativeLinear(*linears, in_bytes=True)
    if kind is not None:
        return kind(*linears)
    whole = nn.Linear(
        weight.shape[1],
        sum(len(linear.weight) for linear in linears),
        bias=linears[0].bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        whole.weight.copy_(torch.cat([linear.weight for linear in linears]))
        if whole.bias is not None:
            whole.bias.copy_(torch.cat([linear.bias for linear in linears if linear.bias is not None]))
    return whole.requires_grad_(False)


def _norm(norm: LlamaRMSNorm, rows: Tensor) -> Tensor:
    return functional.rms_norm(rows, norm.weight.shape, norm.weight, norm.variance_epsilon)
