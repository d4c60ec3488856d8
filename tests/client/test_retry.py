import time

import pytest

from outrider.client.retry import Attempts, Deadline, RetryPolicy, is_transient
from outrider.errors import ERRORS, DeadlineExceeded, OutriderError, Overloaded, Unavailable


def attempts(num_addresses: int = 2, deadline: Deadline | None = None, **policy: float) -> Attempts:
    return Attempts(RetryPolicy(**policy), deadline or Deadline(), num_addresses, jitter=lambda: 1.0)  # type: ignore[arg-type]


def waits(of: Attempts, num: int, error: OutriderError) -> list[float]:
    seconds = []
    for number in range(1, num + 1):
        of.num_failed = number
        seconds.append(of._wait_s(error))
    return seconds


def test_every_address_is_tried_at_once_then_waits_double_up_to_a_bound() -> None:
    found = waits(attempts(2, initial_backoff_s=1, max_backoff_s=3), 8, Unavailable("gone"))
    assert found == [0, 1, 1, 2, 2, 3, 3, 3]


def test_jitter_halves_a_wait_at_most() -> None:
    of = attempts(1, initial_backoff_s=1, max_backoff_s=1)
    of.jitter = lambda: 0.0
    assert waits(of, 1, Unavailable("gone")) == [0.5]


def test_an_overloaded_service_says_how_long_to_wait() -> None:
    assert waits(attempts(1), 1, Overloaded("full", retry_after_s=9)) == [9]


async def test_attempts_end_at_their_number() -> None:
    of = attempts(9, max_attempts=2)
    await of.failed(Unavailable("first"), retry=True)
    with pytest.raises(Unavailable, match="second"):
        await of.failed(Unavailable("second"), retry=True)


async def test_progress_starts_the_count_again() -> None:
    of = attempts(9, max_attempts=2)
    for _ in range(5):
        await of.failed(Unavailable("gone"), retry=True)
        of.progressed()


async def test_what_another_attempt_cannot_cure_is_raised_at_once() -> None:
    with pytest.raises(OutriderError, match="wrong"):
        await attempts().failed(OutriderError("wrong"), retry=False)


async def test_no_wait_goes_beyond_the_deadline() -> None:
    of = attempts(1, Deadline.after(0.5), initial_backoff_s=60, max_backoff_s=60)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await of.failed(Unavailable("gone"), retry=True)
    assert time.monotonic() - begin < 0.5


def test_which_errors_may_pass() -> None:
    passing = {reason for reason, kind in ERRORS.items() if is_transient(kind.from_metadata("", {}))}
    assert passing == {"UNAVAILABLE", "DRAINING", "OVERLOADED"}


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"initial_backoff_s": -1}, {"initial_backoff_s": 3}])
def test_a_policy_is_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="max_attempts must be"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


def test_a_deadline_counts_down_to_zero() -> None:
    assert Deadline().remaining_s is None
    assert Deadline.after(-1).remaining_s == 0
    assert 0 < (Deadline.after(10).remaining_s or 0) <= 10
