"""Unexpected exceptions are named for the caller, and logged with their traceback, but not again and again."""

import pytest

from outrider.errors import Draining, RequestFailed
from outrider.serving.unexpected import UnexpectedErrors


def raised(number: int) -> Exception:
    """Returns an exception that was raised in one of two places."""
    try:
        if number:
            raise KeyError(number)
        raise KeyError(number)
    except KeyError as error:
        return error


def test_one_place_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    errors = UnexpectedErrors(lambda: now)
    for number in (0, 1, 1, 0, 2):
        errors.log("it failed", raised(number), session="s")
    assert [record.num_left_out for record in caplog.records] == [0, 0]  # type: ignore[attr-defined]
    assert all(record.exc_info and record.session == "s" for record in caplog.records)  # type: ignore[attr-defined]
    now = 61.0
    errors.log("it failed", raised(0))
    assert caplog.records[-1].num_left_out == 3  # type: ignore[attr-defined]


def test_what_follows_from_one_exception_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    errors = UnexpectedErrors()
    for message in ("the pass failed", "the request failed", "the request failed"):
        errors.log(message, raised(0))
    assert [record.message for record in caplog.records] == ["the pass failed", "the request failed"]


def test_what_has_a_name_keeps_it_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    errors = UnexpectedErrors()
    draining = Draining("bye")
    assert errors.named("it failed", draining) is draining
    assert not caplog.records
    named = errors.named("it failed", raised(0))
    assert isinstance(named, RequestFailed)
    assert "it failed" in named.message
