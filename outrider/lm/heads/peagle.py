"""P-EAGLE's head (Hui et al. 2026): an EAGLE-3 head of several layers, with mask rows behind the last column.

The input of a mask row is the embedding of the mask token and the fused form of a learned feature, `mask_hidden`. It
attends to all columns and to the mask rows before it, so that fewer rows change nothing in the others. The first layer
is EAGLE-3's (`eagle3`); those behind it are Llama layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.lm.heads.columns import ColumnCache, Columns, Rows
from outrider.lm.heads.decoder_layer import DecoderLayer, visible
from outrider.lm.heads.eagle3 import Eagle3Config, Eagle3Layer
from outrider.lm.heads.parallel import ParallelConfig, ParallelHead, only_columns


@dataclass(frozen=True)
class PEagleConfig(ParallelConfig):
    """The configuration of a head.

    Attributes:
        norm_before_residual: see `Eagle3Config`.
    """

    norm_before_residual: bool


class PEagleHead(ParallelHead):
    """The head; the names of the weights are the published ones."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        layer = config.layer
        first = Eagle3Config(layer, config.target_hidden_size, config.draft_vocab_size, config.norm_before_residual)
        further = [DecoderLayer(layer, has_head_norms=False) for _ in range(config.num_layers - 1)]
        self.layers = nn.ModuleList([Eagle3Layer(first), *further])
        self.mask_hidden = nn.Parameter(torch.zeros(1, config.num_features * config.target_hidden_size))

    def run(self, caches: Sequence[ColumnCache], rows: Sequence[Columns | Rows]) -> Sequence[Tensor]:
        """Run columns of all sessions, and the mask rows behind those that end a text; see `ColumnPasses`."""
        columns = only_columns(rows)
        for cache, item in zip(caches, columns, strict=True):
            cache.reserve(item.end)
        embeddings, hidden = self._inputs(columns)
        rotation = self._rotation([range(item.first, item.end) for item in columns])
        whole_rotation = rotation[0][None], rotation[1][None]
        for number, layer in enumerate(self.layers):
            residual = hidden
            if isinstance(layer, Eagle3Layer):
                projected = layer.project(embeddings[None], hidden[None], whole_rotation)
                query, key, value, residual = (item[0] for item in projected)
            else:
                assert isinstance(layer, DecoderLayer)
                query, key, value = layer.project(hidden, rotation)
            hidden = layer.finish(self._attended(number, caches, columns, query, key, value), residual)
        parts = torch.split(hidden, [item.num_rows for item in columns])
        return [part[-item.num_outputs :] for item, part in zip(columns, parts, strict=True)]

    def _inputs(self, columns: Sequence[Columns]) -> tuple[Tensor, Tensor]:
        """Return the embeddings of all rows, and the fused features beside them: [N, H] each."""
        dtype, mask_token_id = self.norm.weight.dtype, self.config.mask_token_id
        token_ids = [token_id for item in columns for token_id in (*item.token_ids, *[mask_token_id] * item.num_masks)]
        features = [part for item in columns for part in (item.features, self.mask_hidden.expand(item.num_masks, -1))]
        return self.embed(token_ids), self.fc(torch.cat([item.to(dtype) for item in features]))

    def _attended(
        self,
        number: int,
        caches: Sequence[ColumnCache],
        columns: Sequence[Columns],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Store the rows' keys and values, [kv_heads, N, dim], and return what they attended to: [N, heads * dim]."""
        parts = [torch.split(item, [one.num_rows for one in columns], 1) for item in (query, key, value)]
        attended = []
        for cache, item, q, k, v in zip(caches, columns, *parts, strict=True):
            self._store(cache, number, item.first, k, v)
            mask = visible(item.first, item.num_rows, is_causal=True, window=None, device=self.device)
            attended.append(self._attend(cache, number, item.end, q, mask))
        return torch.cat(attended)
