"""Even sharing of a pass's rows among sessions."""

from collections.abc import Sequence
from typing import Final

PREFILL_CHUNK_LEN: Final = 512
"""Rows of one pass of a drafter, over all sessions. More save nothing, because a pass of so many is bound by arithmetic
on CPUs and GPUs alike, and hold up the sessions that a target waits for."""


def share_rows(wanted: Sequence[int], num_rows: int) -> list[int]:
    """Return how many rows of a pass each session gets: all that it wants, or an even share of those that are left.

    Args:
        wanted: rows that each session could use, at least 1.
        num_rows: rows to share; exceeded where sessions are more than rows, since each gets at least 1.
    """
    shares = [0] * len(wanted)
    by_size = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for num_served, index in enumerate(by_size):
        even = max(1, num_rows // (len(wanted) - num_served))
        shares[index] = min(wanted[index], even)
        num_rows -= shares[index]
    return shares
