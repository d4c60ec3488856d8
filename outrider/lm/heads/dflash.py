"""DFlash's head (Chen et al. 2026), and DSpark's (arXiv 2607.05147), which is that with a Markov head behind it.

The rows of a block are the last token of the text, the anchor, and mask tokens behind it. They attend to each other and
to the context: each layer's keys and values of it are those of H = norm(W [f_1; ...; f_m]), the fused features of each
position. Nothing of the context but these depends on the layers, so a column costs two products a layer.

In DFlash a mask token's row predicts the token in its own place, and the anchor's row predicts nothing. In DSpark a row
predicts the token behind its own, and the logits at depth k are U_k + W2 W1[x] after the token x (section 3); the gated
form of it is U_k + W2 (sigmoid(G [h_k; W1[x]]) * W1[x]).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.lm.heads.block_passes import TokenTransition
from outrider.lm.heads.columns import ColumnCache, Columns, Rows
from outrider.lm.heads.decoder_layer import DecoderLayer, visible
from outrider.lm.heads.layers import RmsNorm
from outrider.lm.heads.parallel import NoTransition, ParallelConfig, ParallelHead, only_columns


@dataclass(frozen=True)
class LayerKind:
    """How the rows of a block attend in one layer.

    Attributes:
        is_causal: whether no row attends to those behind it.
        window: positions that a row attends to, its own included; None for all.
    """

    is_causal: bool
    window: int | None


@dataclass(frozen=True)
class DFlashConfig(ParallelConfig):
    """The configuration of a head.

    Attributes:
        kinds: of its layers.
        predicts_from_anchor: whether a row predicts the token behind its own.
        embedding_scale: of the rows' embeddings.
        has_mask_embedding: whether the mask token's embedding is a weight of its own.
        markov_rank: of the Markov head; 0 where there is none.
        is_gated: whether it is the gated one.
    """

    kinds: tuple[LayerKind, ...]
    predicts_from_anchor: bool
    embedding_scale: float
    has_mask_embedding: bool
    markov_rank: int
    is_gated: bool

    @property
    def num_rows(self) -> int:
        """Rows of a block."""
        return self.block_size + (not self.predicts_from_anchor)


class MarkovHead(nn.Module):
    """What the token before adds to the logits at a place; the names of the weights are the published ones.

    Args:
        config: of the head.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, hidden_size = config.markov_rank, config.layer.hidden_size
        self.markov_w1 = nn.Embedding(config.layer.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self._is_gated = config.is_gated
        if config.is_gated:
            self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def states(self, states: Tensor) -> Tensor:
        """Return the states: [R, H]."""
        return states

    def logits(self, logits: Tensor, states: Tensor, rows: list[int], token_ids: list[int]) -> Tensor:
        """Return the logits after nodes, [F, D]; see `TokenTransition`."""
        chosen, previous = torch.tensor([rows, token_ids], device=logits.device)
        embedded = self.markov_w1(previous)
        if self._is_gated:
            embedded = embedded * self.gate_proj(torch.cat([states[chosen], embedded], dim=-1)).sigmoid()
        added: Tensor = self.markov_w2(embedded)
        return logits[chosen] + added


class DFlashHead(ParallelHead):
    """The head; the names of the weights are the published ones.

    A pass always runs the whole block: where rows attend to those behind them, fewer would predict other tokens.
    """

    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        layer = config.layer
        self.hidden_norm = RmsNorm(layer.hidden_size, layer.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layer, has_head_norms=True) for _ in range(config.num_layers))
        if config.has_mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(layer.hidden_size))
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    @property
    def transition(self) -> TokenTransition:
        """What adds to the logits after a token."""
        return self.markov_head or NoTransition()

    def run(self, caches: Sequence[ColumnCache], rows: Sequence[Columns | Rows]) -> Sequence[Tensor]:
        """Run columns of all sessions, and the blocks of those whose text they end; see `ColumnPasses`.

        Returns:
            Of each block all outputs that predict tokens, [block_size, H]; of other sessions none: [0, H].
        """
        columns, num_rows = only_columns(rows), self.config.num_rows
        lens = [len(item.token_ids) for item in columns]
        context = self.hidden_norm(self.fc(torch.cat([item.features for item in columns]).to(self.norm.weight.dtype)))
        rotation = self._rotation(
            [range(item.first, item.first + num) for item, num in zip(columns, lens, strict=True)]
        )
        blocks = [
            (cache, item.first + num, item.token_ids[-1])
            for cache, item, num in zip(caches, columns, lens, strict=True)
            if item.ends_text
        ]
        for cache, item, num in zip(caches, columns, lens, strict=True):
            cache.reserve(item.first + num + num_rows)
        hidden = self._inputs([token_id for _, _, token_id in blocks])
        block_rotation = self._rotation([range(end, end + num_rows) for _, end, _ in blocks]) if blocks else rotation
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            both = [torch.split(item, lens, 1) for item in layer.self_attn.keys_and_values(context, rotation)]
            for cache, item, key, value in zip(caches, columns, *both, strict=True):
                self._store(cache, number, item.first, key, value)
            if blocks:
                ends = [(cache, end) for cache, end, _ in blocks]
                hidden = self._through(number, layer, hidden, block_rotation, ends)
        outputs = iter(hidden.view(-1, num_rows, hidden.shape[-1])[:, num_rows - self.block_size :])
        return [next(outputs) if item.ends_text else hidden[:0] for item in columns]

    def _inputs(self, anchors: Sequence[int]) -> Tensor:
        """Return the embeddings of blocks' rows: [blocks * rows, H]."""
        mask = self.mask_embedding if self.config.has_mask_embedding else self.embed([self.config.mask_token_id])[0]
        masks = mask.expand(len(anchors), self.config.num_rows - 1, -1)
        embedded = self.embed(anchors)[:, None] if anchors else masks.new_empty(0, 1, masks.shape[-1])
        return torch.cat([embedded, masks], dim=1).flatten(0, 1) * self.config.embedding_scale

    def _through(
        self,
        number: int,
        layer: DecoderLayer,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        blocks: Sequence[tuple[ColumnCache, int]],
    ) -> Tensor:
        """Return a layer's outputs of the blocks' rows: [blocks * rows, H].

        Args:
            number: of the layer.
            layer: the layer.
            hidden: its inputs.
            rotation: of the rows.
            blocks: each one's cache, and the slot and position of its first row.
        """
        num_rows, kind = self.config.num_rows, self.config.kinds[number]
        parts = [torch.split(item, num_rows, 1) for item in layer.project(hidden, rotation)]
        attended = []
        for (cache, first), query, key, value in zip(blocks, *parts, strict=True):
            self._store(cache, number, first, key, value)
            mask = visible(first, num_rows, is_causal=kind.is_causal, window=kind.window, device=self.device)
            attended.append(self._attend(cache, number, first + num_rows, query, mask))
        return layer.finish(torch.cat(attended), hidden)
