"""The target's features as drafters take them, and a buffer of those that one has not used yet."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import InvalidArgument
from outrider.tokens import FeatureSpan


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Features at consecutive positions.

    Attributes:
        start: session position of the first one.
        rows: bfloat16 [N, width], on any device.
    """

    start: int
    rows: Tensor

    @classmethod
    def of(cls, span: FeatureSpan, width: int) -> "Features":
        """Return those that came as bytes, `width` numbers each; raise `InvalidArgument` for a part of a position."""
        position_bytes = width * torch.bfloat16.itemsize
        if len(span.data) % position_bytes:
            raise InvalidArgument(f"has {len(span.data)} bytes, a position takes {position_bytes}", "features.data")
        if not span.data:
            return cls(span.start, torch.empty(0, width, dtype=torch.bfloat16))
        return cls(span.start, torch.frombuffer(bytearray(span.data), dtype=torch.bfloat16).view(-1, width))


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

    def give(self, features: Features) -> bool:
        """Add the features that continue the buffer; those that it has already, or that leave a gap, are dropped.

        Returns:
            Whether there is a gap before them.
        """
        if features.start > self.end:
            return True
        new = features.rows[max(0, self.end - features.start) :]
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
