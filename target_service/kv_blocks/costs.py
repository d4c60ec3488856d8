"""The bandwidth at which KV blocks are restored, and whether that beats computing them. Arithmetic only.

The time of computing comes from the model of pass costs (`outrider.control.pass_times`).
"""

from math import inf
from typing import Final

_SMOOTHING: Final = 0.3
_MARGIN: Final = 1.1
"""Restoring has to be faster than computing by this factor: one that fails halfway has cost its time."""


class RestoreCosts:
    """Learns the time of restoring: seconds = seconds of an answer + seconds of a byte * bytes."""

    def __init__(self) -> None:
        self._answer_s = 0.0
        self._byte_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """Bytes restored in a second, without the time of answers; 0 while unknown."""
        return 0.0 if self._byte_s is None else 1 / self._byte_s if self._byte_s else inf

    def observe_answer(self, seconds: float) -> None:
        """Learn from the seconds of an answer without any block."""
        self._answer_s += _SMOOTHING * (seconds - self._answer_s) if self._answer_s else seconds

    def observe_restore(self, num_bytes: int, seconds: float) -> None:
        """Learn from the seconds until so many bytes were in their place."""
        if num_bytes <= 0:
            return
        byte_s = max(0.0, seconds - self._answer_s) / num_bytes
        self._byte_s = byte_s if self._byte_s is None else self._byte_s + _SMOOTHING * (byte_s - self._byte_s)

    def restore_s(self, num_bytes: int) -> float:
        """Return the estimated seconds of restoring so many bytes; infinite before the first measurement."""
        return inf if self._byte_s is None else self._answer_s + self._byte_s * num_bytes

    def pays(self, num_bytes: int, compute_s: float) -> bool:
        """Return whether restoring so many bytes is expected to be faster than computing for so many seconds.

        An unknown time to compute is infinite, so that a target restores what it has never computed.
        """
        return self.restore_s(num_bytes) * _MARGIN < compute_s
