"""A buffer of the target's features that a drafter has not used yet."""

import torch
from torch import Tensor

from outrider.errors import InvalidArgument
from outrider.tokens import FeatureSpan


class FeatureBuffer:
    """Features at consecutive positions, taken from the front.

    Args:
        width: numbers of a position: layers times hidden size.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._start = 0
        self._rows = torch.empty(0, width, dtype=torch.bfloat16)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def start(self) -> int:
        """Session position of the first one, or of the next to arrive."""
        return self._start

    @property
    def end(self) -> int:
        """Session position of the next to arrive."""
        return self._start + len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self._rows.numel() * self._rows.element_size()

    def restart(self, position: int) -> None:
        """Drop all; the next ones begin at this position."""
        self._start = position
        self._rows = self._rows[:0].clone()

    def give(self, features: FeatureSpan) -> bool:
        """Add the features that continue the buffer; those that it has already, or that leave a gap, are dropped.

        Returns:
            Whether there is a gap before them.

        Raises:
            InvalidArgument: the data are not of whole positions.
        """
        position_bytes = self._width * self._rows.element_size()
        if len(features.data) % position_bytes:
            raise InvalidArgument(f"has {len(features.data)} bytes, a position takes {position_bytes}", "features.data")
        if features.start > self.end:
            return True
        if not features.data:
            return False
        rows = torch.frombuffer(bytearray(features.data), dtype=torch.bfloat16).view(-1, self._width)
        new = rows[max(0, self.end - features.start) :]
        self._rows = torch.cat([self._rows, new]) if len(self._rows) else new
        return False

    def take(self, num: int) -> Tensor:
        """Remove and return the first ones: [num, width]."""
        taken, self._rows = self._rows[:num], self._rows[num:]
        self._start += num
        return taken

    def peek(self) -> Tensor:
        """Return them all: [len, width]."""
        return self._rows

    def skip(self, position: int) -> None:
        """Drop those before a position."""
        self.take(min(max(0, position - self._start), len(self._rows)))
        self._start = max(self._start, position)
