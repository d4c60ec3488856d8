"""Counters of the KV blocks that a target wrote and restored."""

from dataclasses import dataclass


@dataclass(slots=True)
class BlockCounters:
    """Outcomes of blocks since the start.

    Attributes:
        num_written: new in Redis; blocks that were there before do not count.
        num_dropped: not written, because Redis is slow, full or gone.
        num_restored: fetched and put into the KV cache.
        num_refused: fetched, but not the block of their key.
        num_failures: calls that Redis did not answer as it should within the bound.
    """

    num_written: int = 0
    num_dropped: int = 0
    num_restored: int = 0
    num_refused: int = 0
    num_failures: int = 0
