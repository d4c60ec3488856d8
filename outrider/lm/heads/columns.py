"""Rows of a pass of a head, the cache of a session's columns, and what runs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """New columns of a session, and the mask rows of a block behind them.

    Attributes:
        features: of the columns: [T, 3 * target_hidden_size].
        token_ids: beside them: T.
        first: slot and position of the first one.
        num_masks: mask rows; 0 but for the columns that end the text of a block head's session.
        ends_text: whether they do.
    """

    features: Tensor
    token_ids: Sequence[int]
    first: int
    num_masks: int = 0
    ends_text: bool = False

    @property
    def num_rows(self) -> int:
        """Columns and mask rows."""
        return len(self.token_ids) + self.num_masks

    @property
    def num_outputs(self) -> int:
        """Rows whose outputs predict tokens: the last column and the mask rows."""
        return 1 + self.num_masks

    @property
    def end(self) -> int:
        """Slot and position behind the last row."""
        return self.first + self.num_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """One session's rows of a pass in parts.

    Attributes:
        hidden: [T, H].
        embeddings: that are concatenated with it: [T, H].
        positions: of the rows.
        first: slot of the first row.
        mask: the slots to which each row attends: bool [T, first + T]; None for all up to its own.
    """

    hidden: Tensor
    embeddings: Tensor
    positions: Sequence[int]
    first: int
    mask: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Their number."""
        return len(self.positions)

    @property
    def num_outputs(self) -> int:
        """All of them: each is a node, whose output predicts tokens."""
        return self.num_rows


class ColumnCache(Protocol):
    """The keys and values of one session's columns: [slots, kv_heads, dim] each, in all layers of the head."""

    keys: Tensor
    values: Tensor

    def reserve(self, num: int) -> None:
        """Have at least so many slots."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, first: int, mask: Tensor | None) -> Tensor:
        """Store new rows' keys and values from slot `first` on, and return their outputs; see `HeadState`."""


class ColumnPasses(Protocol):
    """The passes of a head over columns.

    Attributes:
        num_kv_heads: heads of keys and values that a column has in all layers together.
        head_dim: numbers of one of them.
    """

    num_kv_heads: int
    head_dim: int

    @property
    def device(self) -> torch.device:
        """Where the head is."""

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Return the embeddings of tokens: [N, H]."""

    def run(self, caches: Sequence[ColumnCache], rows: Sequence[Columns | Rows]) -> Sequence[Tensor]:
        """Run rows of all sessions together, and store their keys and values.

        Args:
            caches: of the sessions.
            rows: new columns of each, or rows below its columns.

        Returns:
            Of each session the outputs, before the norm, of the rows that predict tokens: [num_outputs, H].
        """

    def logits(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised outputs, [N, H], and the logits of the draft's tokens, [N, D]."""
