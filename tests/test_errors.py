"""Named errors cross the wire as reason, message and metadata, and come back the same."""

import inspect

import pytest

from outrider import errors
from outrider.errors import (
    ERRORS,
    DataLoss,
    Draining,
    Fenced,
    InvalidArgument,
    KVCacheMiss,
    OutriderError,
    Overloaded,
    TokenizerMismatch,
    from_reason,
)

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, OutriderError) and kind is not OutriderError
]

SAMPLES: list[OutriderError] = [
    InvalidArgument("must be positive", "max_tokens"),
    KVCacheMiss("too late", 42),
    Overloaded("full", 2.5),
    TokenizerMismatch("they differ", "ab", "cd"),
    *(kind("message") for kind in CLASSES if kind.__init__ is OutriderError.__init__),
]


def test_the_table_names_every_error_once() -> None:
    assert set(ERRORS.values()) == set(CLASSES)
    assert len(ERRORS) == len(CLASSES)
    assert {type(error) for error in SAMPLES} == set(CLASSES)


def test_the_docstring_draws_every_error() -> None:
    drawing = errors.__doc__ or ""
    assert [kind.__name__ for kind in CLASSES if f"── {kind.__name__} " not in drawing] == []


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: error.reason)
def test_errors_cross_the_wire(error: OutriderError) -> None:
    metadata = error.metadata
    assert all(isinstance(value, str) for value in metadata.values())
    back = from_reason(error.reason, error.message, metadata)
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.reason)
def test_absent_metadata_is_borne(kind: type[OutriderError]) -> None:
    assert isinstance(from_reason(kind.reason, "message", {}), kind)


def test_a_reason_of_a_newer_version_is_a_plain_error() -> None:
    error = from_reason("NEWER", "something", {"field": "x"})
    assert type(error) is OutriderError
    assert (error.message, error.metadata) == ("something", {})


def test_an_invalid_argument_names_its_field_once() -> None:
    assert str(InvalidArgument("must be positive", "top_k")) == "top_k: must be positive"
    assert str(InvalidArgument("top_k is -1", "top_k")) == "top_k is -1"


def test_errors_are_told_apart_by_class() -> None:
    for kind in (Fenced, Draining, DataLoss):
        with pytest.raises(kind):
            raise from_reason(kind.reason, "message", {})
