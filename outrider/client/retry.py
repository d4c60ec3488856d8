"""Retries of the client: number of attempts, backoff with jitter, deadline."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from outrider.errors import DeadlineExceeded, Draining, OutriderError, Overloaded, Unavailable


class ClientClosed(Unavailable):
    """The client was closed, before this call or during it; no attempt follows."""

    def __init__(self, message: str = "the client is closed") -> None:
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on retries.

    Attributes:
        max_attempts: attempts in a row without a new token; at least 1.
        initial_backoff_s: wait after every address has failed once.
        max_backoff_s: longest wait; waits double up to it.
    """

    max_attempts: int = 10
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or not 0 <= self.initial_backoff_s <= self.max_backoff_s:
            raise ValueError(f"max_attempts must be at least 1 and 0 <= initial_backoff_s <= max_backoff_s: {self}")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time after which nothing is tried; `at` is in seconds of `time.monotonic`, None for never."""

    at: float | None = None

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        """Return the deadline `timeout_s` seconds from now."""
        return cls(None if timeout_s is None else monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float | None:
        """Seconds left, at least 0; None for no deadline."""
        return None if self.at is None else max(0.0, self.at - monotonic())


@dataclass(slots=True)
class Attempts:
    """Counts attempts without progress and waits between them.

    `num_addresses` attempts follow each other at once, since another replica is likely to answer; after that every
    attempt waits, with jitter, so that the clients of a lost replica do not come back all together.
    """

    policy: RetryPolicy
    deadline: Deadline
    num_addresses: int
    num_failed: int = 0
    jitter: Callable[[], float] = field(default=random.random, repr=False)

    def progressed(self) -> None:
        """Record that a new token has come: the count starts again."""
        self.num_failed = 0

    async def failed(self, error: OutriderError, *, retry: bool) -> None:
        """Wait before the next attempt; raise `error` where `retry` is false.

        Raises:
            OutriderError: `error`, where there is to be no other attempt or attempts have run out.
            DeadlineExceeded: the deadline comes before the next attempt.
        """
        self.num_failed += 1
        if not retry or self.num_failed >= self.policy.max_attempts:
            raise error
        wait_s = self._wait_s(error)
        remaining_s = self.deadline.remaining_s
        if remaining_s is not None and wait_s >= remaining_s:
            raise DeadlineExceeded(f"deadline passed while retrying after: {error.message}") from error
        await asyncio.sleep(wait_s)

    def _wait_s(self, error: OutriderError) -> float:
        rounds = self.num_failed // self.num_addresses
        if rounds == 0:
            return 0.0
        backoff_s = min(self.policy.max_backoff_s, self.policy.initial_backoff_s * 2.0 ** min(rounds - 1, 30))
        least_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        return max(least_s, backoff_s * (0.5 + self.jitter() / 2))


def is_transient(error: OutriderError) -> bool:
    """Return whether another attempt, at this address or another, may succeed."""
    return isinstance(error, (Unavailable, Draining, Overloaded)) and not isinstance(error, ClientClosed)
