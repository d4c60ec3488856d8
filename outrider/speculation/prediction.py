"""A prediction of a request's output, followed along the output that comes: where the two agree, and where again."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

_SIZE: Final = 3
"""Tokens of the output that must stand in the prediction for it to go on there after a difference."""


class Prediction:
    """A prediction, and the place in it to which the output has come.

    It begins at its first token. After a difference it goes on behind the last `_SIZE` tokens of the output, where they
    stand next in the prediction; else where they stand first, since text may have been moved. The place follows from
    prediction and output alone.

    It takes 16 bytes a token, and is made in O(n log n).

    Args:
        token_ids: the prediction.

    Attributes:
        token_ids: the prediction, unsigned 32-bit.
        position: of the token that is expected next; None after a difference, until it goes on.
        num_agreeing: tokens of the output, up to its end, that are those of the prediction before `position`.
        num_accepted: tokens of the output that were the expected ones.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = array("I", token_ids)
        self.position: int | None = 0
        self.num_agreeing = 0
        self.num_accepted = 0
        self._left_at = 0
        self._recent: list[int] = []
        # The hash of each `_SIZE` tokens and the position behind them, by hash and then by position.
        hashes = [hash(tuple(self.token_ids[end - _SIZE : end])) for end in range(_SIZE, len(self.token_ids) + 1)]
        order = sorted(range(len(hashes)), key=hashes.__getitem__)
        self._hashes = array("q", (hashes[index] for index in order))
        self._ends = array("I", (index + _SIZE for index in order))

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go along with output, in O(its tokens)."""
        for token_id in token_ids:
            self._recent = [*self._recent[1 - _SIZE :], token_id]
            if self._expects(token_id):
                assert self.position is not None
                self.position += 1
                self.num_agreeing += 1
                self.num_accepted += 1
            else:
                self._leave()

    def _expects(self, token_id: int) -> bool:
        position = self.position
        return position is not None and position < len(self.token_ids) and self.token_ids[position] == token_id

    def _leave(self) -> None:
        """Look where the prediction goes on behind the latest output."""
        if self.position is not None:
            self._left_at = self.position
        self.position, self.num_agreeing = None, 0
        key = hash(tuple(self._recent))
        first, last = bisect_left(self._hashes, key), bisect_right(self._hashes, key)
        if first == last:
            return
        following = bisect_left(self._ends, self._left_at, first, last)
        end = self._ends[following if following < last else first]
        # Equal hashes may be of other tokens.
        if self.token_ids[end - _SIZE : end].tolist() == self._recent:
            self.position, self.num_agreeing = end, _SIZE
