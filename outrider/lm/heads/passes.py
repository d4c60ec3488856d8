"""A pass of an EAGLE-3 head in parts, between which sessions attend and trees grow.

A head is so small that what lies between its products takes longer than they do. So each part is one native operator
where there are any (`outrider.native`). Else products of one input are one, norms are one operator each, and rotations
are looked up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider import native
from outrider.lm.heads.block import Transition
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.packed_linear import ByteLinear, NativeLinear, packed_kind

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
        self._num_inner = mlp.down_proj.in_features
        self._qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = joined(attention.o_proj)
        self._gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self._down = joined(mlp.down_proj)
        self._output = joined(head.lm_head)
        rope = getattr(config, "rope_parameters", None) or {}
        self._varies = rope.get("rope_type", "default") in _VARYING_ROPE
        self._rotations: tuple[Tensor, Tensor] | None = None
        products = (self._qkv, self._o, self._gate_up, self._down, self._output)
        self._variant = _variant_of(products) if isinstance(self._act, SiLUActivation | nn.SiLU) else None

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
        cosine, sine = self._rotations_of(hidden, positions)
        num_rotated = self._num_heads + self._num_kv_heads
        if self._variant is not None:
            heads, normed = torch.ops.outrider.head_project.default(
                embeddings,
                hidden,
                self._input_norms,
                self._epsilon,
                self._qkv.tensors,
                cosine,
                sine,
                positions,
                num_rotated + self._num_kv_heads,
                num_rotated,
                self._variant,
            )
            heads, residual = heads.transpose(0, 1), normed if self._starts_normed else hidden
            return heads[: self._num_heads], heads[self._num_heads : num_rotated], heads[num_rotated:], residual
        rows = torch.stack([embeddings, hidden], dim=1)
        normed = functional.rms_norm(rows, rows.shape[-1:], eps=self._epsilon) * self._input_norms
        heads = self._qkv(normed.flatten(1)).view(len(rows), -1, self._head_dim).transpose(0, 1)
        cosine, sine = cosine[positions], sine[positions]
        turned = heads[:num_rotated]
        first, second = turned.chunk(2, dim=-1)
        rotated = turned * cosine + torch.cat([-second, first], dim=-1) * sine
        residual = normed[:, 1] if self._starts_normed else hidden
        return rotated[: self._num_heads], rotated[self._num_heads :], heads[num_rotated:], residual

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the outputs of rows, [N, H], given what they attended to, [N, heads * dim]."""
        if self._variant is not None:
            found: Tensor = torch.ops.outrider.head_finish.default(
                attended,
                residual,
                self._o.tensors,
                self._norms[0].weight,
                self._epsilon,
                self._gate_up.tensors,
                self._down.tensors,
                self._num_inner,
                self._variant,
            )
            return found
        hidden = residual + self._o(attended)
        gate, up = self._gate_up(_norm(self._norms[0], hidden)).chunk(2, dim=-1)
        outputs: Tensor = hidden + self._down(self._act(gate) * up)
        return outputs

    def logits(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised outputs, [N, H], and the logits of the draft's tokens, [N, D]."""
        if self._variant is not None:
            output, norm = self._output, self._norms[1]
            states, logits = torch.ops.outrider.head_logits.default(
                outputs, norm.weight, norm.variance_epsilon, output.tensors, output.out_features, self._variant
            )
            return states, logits
        states = _norm(self._norms[1], outputs)
        return states, self._output(states)

    def _rotations_of(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines: [P, dim], of which those at `positions` are asked for."""
        end = int(positions.max()) + 1
        if self._varies:
            cosine, sine = self._rotary(hidden[None], torch.arange(end, device=positions.device)[None])
            return cosine[0], sine[0]
        if self._rotations is None or len(self._rotations[0]) < end:
            every = torch.arange(max(_FIRST_POSITIONS, 2 * end), device=positions.device)
            cosine, sine = self._rotary(hidden[None], every[None])
            self._rotations = cosine[0], sine[0]
        return self._rotations


class TransitionPass:
    """The transition of a block head, packed; see `outrider.lm.heads.block`.

    Args:
        transition: in bfloat16, on its device.
        embedding: the target's input embeddings: [V, H].
    """

    def __init__(self, transition: Transition, embedding: Tensor) -> None:
        self._token, self._state = joined(transition.token), joined(transition.state)
        self._output = joined(transition.output)
        self._embedding = embedding
        self._variant = _variant_of((self._token, self._output)) if embedding.is_contiguous() else None

    def states(self, states: Tensor) -> Tensor:
        """Return what states, [R, H], add to a transition: [R, rank]."""
        added: Tensor = self._state(states)
        return added

    def logits(self, logits: Tensor, states: Tensor, rows: list[int], token_ids: list[int]) -> Tensor:
        """Return the logits after nodes: [F, D].

        Args:
            logits: of all rows without a transition: [R, D].
            states: what `states` returned for them: [R, rank].
            rows: of the nodes: F of them.
            token_ids: the nodes' own tokens.
        """
        if self._variant is not None:
            found: Tensor = torch.ops.outrider.transition_logits.default(
                logits,
                states,
                rows,
                token_ids,
                self._embedding,
                self._token.tensors,
                self._output.tensors,
                self._variant,
            )
            return found
        chosen, previous = torch.tensor([rows, token_ids], device=states.device)
        embedded = functional.embedding(previous, self._embedding)
        added: Tensor = self._output(functional.silu(self._token(embedded) + states[chosen]))
        return logits[chosen] + added


def joined(*linears: nn.Linear) -> nn.Module:
    """Return layers with the same input as one layer, packed where that can be (see `packed_linear`).

    The native product has their weights in 8 bits: a draft need not be exact.
    """
    weight = linears[0].weight
    kind = packed_kind() if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" else None
    if kind is not None:
        has_bytes = kind is NativeLinear and weight.shape[1] <= native.MOST_BYTE_INPUTS
        return (ByteLinear if has_bytes else kind)(*linears)
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


def _variant_of(products: Sequence[nn.Module]) -> int | None:
    """Return the variant of a head's native operators; None where one of its products is not theirs."""
    variants = [item.variant for item in products if isinstance(item, ByteLinear)]
    return variants[0] if len(variants) == len(products) else None


def _norm(norm: LlamaRMSNorm, rows: Tensor) -> Tensor:
    return functional.rms_norm(rows, norm.weight.shape, norm.weight, norm.variance_epsilon)
