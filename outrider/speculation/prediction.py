"""A prediction of a request's output, followed along the output that comes: where the two agree, and where again."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

_SIZE: Final = 3
"""Tokens of the output that must stand in the prediction for it to go on there after a difference."""


class Prediction:
    """A prediction, and the place in it to which the output has come.

    It begins at its first token. After a difference it goes on behind the last `_SIZE` tokens of the output, where they
    stand next in the prediction; else where they stand first, since text may have been moved. The place follows from
    prediction and output alone.

    Args:
        token_ids: the prediction.

    Attributes:
        token_ids: the prediction.
        position: of the token that is expected next; None after a difference, until it goes on.
        num_agreeing: tokens of the output, up to its end, that are those of the prediction before `position`.
        num_accepted: tokens of the output that were the expected ones.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.position: int | None = 0
        self.num_agreeing = 0
        self.num_accepted = 0
        self._left_at = 0
        self._recent: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] | None = None

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
        places = self._all_places().get(tuple(self._recent), ())
        if places:
            following = bisect_left(places, self._left_at)
            self.position = places[following if following < len(places) else 0]
            self.num_agreeing = _SIZE

    def _all_places(self) -> dict[tuple[int, ...], list[int]]:
        """Return the positions behind each `_SIZE` tokens of the prediction, in order."""
        if self._places is None:
            self._places = {}
            for end in range(_SIZE, len(self.token_ids) + 1):
                self._places.setdefault(tuple(self.token_ids[end - _SIZE : end]), []).append(end)
        return self._places
