"""An EAGLE-3 head's state of one session: its columns, and features that are to become columns."""

from array import array
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from outrider import native
from outrider.drafters.features import FeatureBuffer
from outrider.drafters.grown_tree import GrownTree
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree import DraftTree
from outrider.lm.attention.native import PAGE_LEN, lay_out
from outrider.lm.attention.rows import PassBranch, PassRows
from outrider.lm.heads.decoder_layer import attention

_FIRST_CAPACITY: Final = 8 * PAGE_LEN


class HeadState:
    """The keys and values of one session's columns, and features that are to become columns.

    Args:
        num_heads: of keys and values.
        head_dim: of one of them.
        feature_width: numbers of a position's features.
        device: where the head is.
    """

    def __init__(self, num_heads: int, head_dim: int, feature_width: int, device: torch.device) -> None:
        # By slots: [slots, kv_heads, dim].
        size = (_FIRST_CAPACITY, num_heads, head_dim)
        self.keys = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros_like(self.keys)
        self._variant = native.best_variant() if device.type == "cpu" and head_dim % 2 == 0 else None
        self.features = FeatureBuffer(feature_width)
        self.last_output: Tensor | None = None
        """Output of the last column, [1, H], and of the rows of its block behind it: [K, H]."""
        self.node_values = NodeValues.of_one_session()
        """Of this session's nodes."""
        self.drafted: DraftTree | GrownTree | None = None
        """The last tree that was drafted, whose outcome has yet to be observed."""
        self._token_ids = array("I")
        self._agreed_len = 0

    @property
    def num_columns(self) -> int:
        """Positions whose columns have been run."""
        return max(0, len(self._token_ids) - 1)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return 2 * self.keys.numel() * self.keys.element_size() + self.features.num_bytes

    def release(self) -> None:
        """Drop the columns and the features."""
        self.truncate(0)

    def recheck_from(self, length: int) -> None:
        """Have the columns from position `length` on compared again with the session's tokens."""
        self._agreed_len = min(self._agreed_len, length)

    def match(self, token_ids: Sequence[int]) -> None:
        """Keep the columns that belong to these tokens of the session, and drop the others."""
        # The column of the last token but one is the last that can be run.
        known_len = min(len(self._token_ids), len(token_ids))
        agreed_len = min(self._agreed_len, known_len)
        while agreed_len < known_len and self._token_ids[agreed_len] == token_ids[agreed_len]:
            agreed_len += 1
        self._agreed_len = agreed_len
        if agreed_len < len(self._token_ids):
            self.truncate(max(0, agreed_len - 1))
        self.features.skip(self.num_columns)

    def truncate(self, num_columns: int) -> None:
        """Drop the columns from a position on; their features are needed again."""
        del self._token_ids[num_columns + 1 if num_columns else 0 :]
        self._agreed_len = min(self._agreed_len, len(self._token_ids))
        self.last_output = None
        self.features.restart(num_columns)

    def extend(self, token_ids: Sequence[int], last_output: Tensor) -> None:
        """Add columns that have been run.

        Args:
            token_ids: the session's, of the columns and one more.
            last_output: of the last of them; see the attribute.
        """
        self._token_ids.extend(token_ids[1:] if self._token_ids else token_ids)
        self._agreed_len = len(self._token_ids)
        self.last_output = last_output

    def attend(self, query: Tensor, key: Tensor, value: Tensor, first: int, mask: Tensor | None) -> Tensor:
        """Store new rows' keys and values from slot `first` on, and return their outputs.

        Args:
            query: [heads, T, dim].
            key: [kv_heads, T, dim].
            value: [kv_heads, T, dim].
            first: slots before it are columns, or nodes that were run before.
            mask: the slots to which each row attends: bool [T, first + T]; None for all up to its own.

        Returns:
            [T, heads * dim].
        """
        end = first + key.shape[1]
        self.reserve(end)
        if mask is None and self._variant is not None:
            layout = lay_out(_rows_of(first, end)).layout
            found: Tensor = torch.ops.outrider.paged_attention.default(
                query[None],
                key[None],
                value[None],
                _pages(self.keys),
                _pages(self.values),
                layout,
                query.shape[-1] ** -0.5,
                0,
                0.0,
                int(self._variant),
            )
            return found.flatten(2)[0]
        if mask is None:
            mask = torch.ones(key.shape[1], end, dtype=torch.bool, device=key.device).tril(first)
        self.keys[first:end], self.values[first:end] = key.transpose(0, 1), value.transpose(0, 1)
        return attention(query, self.keys[:end], self.values[:end], mask)

    def reserve(self, num: int) -> None:
        """Have at least so many slots."""
        more = num - len(self.keys)
        if more > 0:
            # At least twice as much, so that a long session is not copied again and again.
            more = -(-max(more, len(self.keys)) // PAGE_LEN) * PAGE_LEN
            padding = (0, 0, 0, 0, 0, more)
            self.keys, self.values = functional.pad(self.keys, padding), functional.pad(self.values, padding)


def _pages(stored: Tensor) -> Tensor:
    """Return slots as the native operator has them: [pages, kv_heads, page_len, dim]."""
    return stored.view(-1, PAGE_LEN, *stored.shape[1:]).transpose(1, 2)


def _rows_of(first: int, end: int) -> PassRows:
    """Return the rows of a pass that are written to these slots, and see those up to their own."""
    slots, num = tuple(range(first, end)), end - first
    pages = tuple(range(-(-end // PAGE_LEN)))
    return PassRows(num, [PassBranch(pages, tuple(range(num)), slots)], list(range(num)), list(slots))
