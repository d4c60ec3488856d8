"""A pass of an EAGLE-3 head: over new columns of sessions at once, or in parts, between which drafted tokens attend.

A head is so small that what lies between its products takes longer than they do. So the layer over columns is one
native operator, and each part is one, where there are any (`outrider.native`). Else products of one input are one,
norms are one operator each, and rotations are looked up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from outrider import native
from outrider.lm.heads.block import BlockHead
from outrider.lm.heads.columns import ColumnCache, Columns, Rows
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.layers import RmsNorm
from outrider.lm.packed_linear import ByteLinear, NativeLinear, packed_kind

_VARYING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest position of a pass."""
_FIRST_POSITIONS = 2048


class HeadPasses:
    """The passes of a head; rows are [N, ...]. See the module.

    Args:
        head: in bfloat16, on its device.
        embedding: the target's input embeddings: [V, H].

    Attributes:
        head_dim: numbers of a head of keys or values.
        num_kv_heads: such heads of a column.
        device: where the head is.
        embedding: the target's input embeddings: [V, H].
        norm: of outputs.
        output: the layer that makes logits of them, packed.
    """

    def __init__(self, head: Eagle3Head, embedding: Tensor) -> None:
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        config = head.config.layer
        self.embedding = embedding
        # Embeddings and features of mask rows: [2, K - 1, H].
        if isinstance(head, BlockHead):
            self._masks = torch.stack([head.mask_embeddings, head.mask_features]).detach()
        else:
            self._masks = embedding.new_empty(2, 0, config.hidden_size)
        # Only what is used is kept, so that the head's own layers are freed with it.
        self._norm, self.norm = layer.post_attention_layernorm, head.norm
        # Of a token's embedding, of the feature beside it, and after attention: [3, H].
        norms = layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm
        self._layer_norms = torch.stack([item.weight for item in norms]).detach()
        self._input_norms = self._layer_norms[:2]
        self._epsilon = layer.hidden_norm.eps
        self._starts_normed = layer.norm_before_residual
        self._rotary = head.rotary
        self._fc = joined(head.fc)
        self.head_dim = attention.head_dim
        self._num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.device = embedding.device
        self._act = mlp.act_fn
        self._num_inner = mlp.down_proj.in_features
        self._qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = joined(attention.o_proj)
        self._gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self._down = joined(mlp.down_proj)
        self.output = joined(head.lm_head)
        rope = getattr(config, "rope_parameters", None) or {}
        self._varies = rope.get("rope_type", "default") in _VARYING_ROPE
        self._rotations: tuple[Tensor, Tensor] | None = None
        products = (self._qkv, self._o, self._gate_up, self._down, self.output)
        self._variant = variant_of(products) if isinstance(self._act, SiLUActivation | nn.SiLU) else None
        can_pair = self.head_dim % 2 == 0 and embedding.is_contiguous()
        self._column_variant = self._variant if can_pair and variant_of([self._fc]) is not None else None

    @property
    def has_columns(self) -> bool:
        """Whether there is `columns`: one operator for all that is done with new columns."""
        return self._column_variant is not None

    def columns(self, sessions: Sequence[Columns], keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Return the outputs of each session's last column and of the mask rows behind it: [N, H].

        Args:
            sessions: each one's columns.
            keys: of each session, [slots, kv_heads, dim], with room for the rows, whose keys are stored.
            values: likewise.
        """
        assert self._column_variant is not None
        cosine, sine = self._rotations_to(max(item.end for item in sessions))
        features = [item.features for item in sessions]
        found: Tensor = torch.ops.outrider.head_columns.default(
            features[0] if len(features) == 1 else torch.cat(features),
            [token_id for item in sessions for token_id in item.token_ids],
            [len(item.token_ids) for item in sessions],
            [item.num_masks for item in sessions],
            [item.first for item in sessions],
            keys,
            values,
            self.embedding,
            self._masks,
            self._fc.tensors,
            self._layer_norms,
            self._epsilon,
            self._starts_normed,
            self._qkv.tensors,
            cosine,
            sine,
            self._num_heads,
            self._o.tensors,
            self._gate_up.tensors,
            self._down.tensors,
            self._num_inner,
            self._column_variant,
        )
        return found

    def run(self, caches: Sequence[ColumnCache], rows: Sequence[Columns | Rows]) -> Sequence[Tensor]:
        """Run rows of all sessions together; see `ColumnPasses`."""
        columns = [item for item in rows if isinstance(item, Columns)]
        if len(columns) < len(rows) or not self.has_columns:
            outputs = self._run_parts(caches, rows)
        else:
            for cache, item in zip(caches, columns, strict=True):
                cache.reserve(item.end)
            outputs = self.columns(columns, [item.keys for item in caches], [item.values for item in caches])
        return torch.split(outputs, [item.num_outputs for item in rows])

    def _run_parts(self, caches: Sequence[ColumnCache], rows: Sequence[Columns | Rows]) -> Tensor:
        """Run rows of which some attend to other slots than all those up to their own."""
        given = [self.rows(item) if isinstance(item, Columns) else item for item in rows]
        lens = [item.num_rows for item in given]
        positions = torch.tensor([position for item in given for position in item.positions], device=self.device)
        hidden = _whole([item.hidden for item in given])
        embeddings = _whole([item.embeddings for item in given])
        query, key, value, residual = self.project(embeddings, hidden, positions)
        parts = zip(caches, given, *(torch.split(item, lens, 1) for item in (query, key, value)), strict=True)
        attended = [cache.attend(q, k, v, item.first, item.mask) for cache, item, q, k, v in parts]
        lasts = [slice(item.num_rows - item.num_outputs, None) for item in rows]
        residuals = zip(torch.split(residual, lens), lasts, strict=True)
        return self.finish(
            _whole([item[last] for item, last in zip(attended, lasts, strict=True)]),
            _whole([item[last] for item, last in residuals]),
        )

    def rows(self, columns: Columns) -> Rows:
        """Return new columns of a session, and the mask rows behind them, as rows of a pass in parts."""
        hidden, embeddings = self._fc(columns.features), self.embed(columns.token_ids)
        if num := columns.num_masks:
            hidden = torch.cat([hidden, hidden[-1:] + self._masks[1, :num]])
            embeddings = torch.cat([embeddings, self._masks[0, :num]])
        return Rows(hidden, embeddings, range(columns.first, columns.end), columns.first)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Return the embeddings of tokens: [N, H]."""
        return functional.embedding(torch.tensor(token_ids, device=self.device), self.embedding)

    def project(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rotated queries [heads, N, dim], rotated keys and values [kv_heads, N, dim], and the residual [N, H].

        Args:
            embeddings: of the rows' tokens: [N, H].
            hidden: the fused features of a column, the output of the parent for a drafted token: [N, H].
            positions: for the rotary embedding, int64 [N].
        """
        cosine, sine = self._rotations_to(int(positions.max()) + 1)
        num_rotated = self._num_heads + self.num_kv_heads
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
                num_rotated + self.num_kv_heads,
                num_rotated,
                self._variant,
            )
            heads, residual = heads.transpose(0, 1), normed if self._starts_normed else hidden
            return heads[: self._num_heads], heads[self._num_heads : num_rotated], heads[num_rotated:], residual
        rows = torch.stack([embeddings, hidden], dim=1)
        normed = functional.rms_norm(rows, rows.shape[-1:], eps=self._epsilon) * self._input_norms
        heads = self._qkv(normed.flatten(1)).view(len(rows), -1, self.head_dim).transpose(0, 1)
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
                self._norm.weight,
                self._epsilon,
                self._gate_up.tensors,
                self._down.tensors,
                self._num_inner,
                self._variant,
            )
            return found
        hidden = residual + self._o(attended)
        gate, up = self._gate_up(_norm(self._norm, hidden)).chunk(2, dim=-1)
        outputs: Tensor = hidden + self._down(self._act(gate) * up)
        return outputs

    def logits(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised outputs, [N, H], and the logits of the draft's tokens, [N, D]."""
        if self._variant is not None:
            output, norm = self.output, self.norm
            states, logits = torch.ops.outrider.head_logits.default(
                outputs, norm.weight, norm.eps, output.tensors, output.out_features, self._variant
            )
            return states, logits
        states = _norm(self.norm, outputs)
        return states, self.output(states)

    def _rotations_to(self, end: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions: [P, dim], at least of those before `end`."""
        device, like = self.device, self._layer_norms[None]
        if self._varies:
            cosine, sine = self._rotary(like, torch.arange(end, device=device)[None])
            return cosine[0], sine[0]
        if self._rotations is None or len(self._rotations[0]) < end:
            every = torch.arange(max(_FIRST_POSITIONS, 2 * end), device=device)
            cosine, sine = self._rotary(like, every[None])
            self._rotations = cosine[0], sine[0]
        return self._rotations


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


def variant_of(products: Sequence[nn.Module]) -> int | None:
    """Return the variant of a head's native operators; None where one of its products is not theirs."""
    variants = [item.variant for item in products if isinstance(item, ByteLinear)]
    return variants[0] if len(variants) == len(products) else None


def _norm(norm: RmsNorm, rows: Tensor) -> Tensor:
    return functional.rms_norm(rows, norm.weight.shape, norm.weight, norm.eps)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Return all sessions' rows: as they are where there is one session."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
