"""What heads that draft a block in one pass have in common in the published layouts (`dflash`, `peagle`).

Other than the head that `outrider distill` makes (`block`), they have several layers, so that a column has keys and
values in each: a cache holds those of all layers beside each other, as if they were more heads of one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from outrider.errors import ModelUnsupported
from outrider.lm.heads.block_passes import TokenTransition
from outrider.lm.heads.columns import ColumnCache, Columns, Rows
from outrider.lm.heads.decoder_layer import attention
from outrider.lm.heads.layers import RmsNorm, rotary_embedding
from outrider.lm.heads.passes import joined


@dataclass(frozen=True)
class ParallelConfig:
    """The configuration of a head.

    Attributes:
        layer: of its decoder layers.
        num_layers: their number.
        target_hidden_size: width of one feature.
        num_features: of a position.
        draft_vocab_size: D.
        block_size: tokens that a pass predicts, at least 1.
        mask_token_id: whose embedding stands where no one knows a token yet.
        has_embedding: whether the checkpoint has input embeddings of its own.
    """

    layer: LlamaConfig
    num_layers: int
    target_hidden_size: int
    num_features: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    has_embedding: bool


class NoTransition:
    """The tokens of a block do not know of each other: those at one depth have the same logits after every path."""

    def states(self, states: Tensor) -> Tensor:
        """Return the states."""
        return states

    def logits(self, logits: Tensor, states: Tensor, rows: list[int], token_ids: list[int]) -> Tensor:
        """Return the logits of the nodes' rows: [F, D]."""
        return logits[torch.tensor(rows, device=logits.device)]


class ParallelHead(nn.Module, ABC):
    """A head of several layers, which runs its own passes (see `BlockRun`); call `share` before the first.

    Args:
        config: its configuration.

    Attributes:
        num_kv_heads: heads of keys and values of all layers together.
        head_dim: numbers of one of them.
        block_size: tokens that a pass predicts.
    """

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        layer = config.layer
        self.config = config
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, layer.hidden_size, bias=False)
        self.norm = RmsNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size)
        self.rotary = rotary_embedding(layer)
        self._num_layer_heads = layer.num_key_value_heads or layer.num_attention_heads
        self.num_kv_heads = config.num_layers * self._num_layer_heads
        self.head_dim: int = layer.head_dim or layer.hidden_size // layer.num_attention_heads
        self.block_size = config.block_size
        self._embedding = torch.empty(0)

    @property
    def transition(self) -> TokenTransition:
        """What adds to the logits after a token."""
        return NoTransition()

    @property
    def device(self) -> torch.device:
        """Where the head is."""
        return self.norm.weight.device

    def share(self, embedding: Tensor) -> None:
        """Take the target's input embeddings, [V, H], where the checkpoint has none, and pack the weights.

        Raises:
            ModelUnsupported: they have another width, or none for the mask token.
        """
        own = self.embed_tokens.weight if self.config.has_embedding else embedding
        num, width = own.shape
        if width != self.config.layer.hidden_size:
            raise ModelUnsupported(
                f"the head has no embed_tokens.weight, and the target's embeddings have {width} numbers, "
                f"not {self.config.layer.hidden_size}"
            )
        if not 0 <= self.config.mask_token_id < num:
            raise ModelUnsupported(f"there is no embedding of the mask token {self.config.mask_token_id}")
        self._embedding = own
        pack(self)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Return the embeddings of tokens: [N, H]."""
        return functional.embedding(torch.tensor(token_ids, device=self.device), self._embedding)

    @abstractmethod
    def run(self, caches: Sequence[ColumnCache], rows: Sequence[Columns | Rows]) -> Sequence[Tensor]:
        """Run columns of all sessions together; see `ColumnPasses`."""

    def logits(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised outputs, [N, H], and the logits of the draft's tokens, [N, D]."""
        states = self.norm(outputs)
        return states, self.lm_head(states)

    def _rotation(self, positions: Sequence[range]) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions: [N, dim]."""
        every = torch.cat([torch.arange(item.start, item.stop, device=self.device) for item in positions])
        cosine, sine = self.rotary(self.norm.weight[None, None], every[None])
        return cosine[0], sine[0]

    def _store(self, cache: ColumnCache, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values of a layer, [kv_heads, T, dim], from a slot on that the cache has."""
        end, heads = first + key.shape[1], self._heads(layer)
        cache.keys[first:end, heads], cache.values[first:end, heads] = key.transpose(0, 1), value.transpose(0, 1)

    def _attend(self, cache: ColumnCache, layer: int, end: int, query: Tensor, mask: Tensor | None) -> Tensor:
        """Return what queries, [heads, T, dim], attended to in a layer's slots before `end`: [T, heads * dim]."""
        heads = self._heads(layer)
        keys, values = (item[:end, heads].to(query.dtype) for item in (cache.keys, cache.values))
        return attention(query, keys, values, mask)

    def _heads(self, layer: int) -> slice:
        return slice(layer * self._num_layer_heads, (layer + 1) * self._num_layer_heads)


def only_columns(rows: Sequence[Columns | Rows]) -> list[Columns]:
    """Return rows, which are all columns: a block's trees need no pass of their own."""
    return [item for item in rows if isinstance(item, Columns)]


def pack(head: nn.Module) -> None:
    """Replace every linear layer by its packed form, where there is one (see `joined`)."""
    for parent in list(head.modules()):
        linears: dict[str, Any] = {name: item for name, item in parent.named_children() if type(item) is nn.Linear}
        for name, linear in linears.items():
            setattr(parent, name, joined(linear))
