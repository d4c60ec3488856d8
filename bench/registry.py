"""The benches by name, and how one is run; `outrider bench` is their door."""

import asyncio
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.result import BenchResult
from outrider.errors import InvalidArgument

_MODULES = {
    name: f"bench.{name}"
    for name in (
        "overhead",
        "speed",
        "engine",
        "load",
        "context",
        "drafts",
        "takeover",
        "commits",
        "orchestrator",
        "distance",
        "capacity",
        "sweep",
        "outage",
        "rollout",
        "fleet",
    )
}


def names() -> tuple[str, ...]:
    """Returns the names of all benches."""
    return tuple(_MODULES)


def run(name: str, *, arguments: Mapping[str, str], plot: Path | None = None) -> dict[str, Any]:
    """Runs a bench and returns its result as plain values; see `BenchResult`.

    Args:
        name: one of `names()`.
        arguments: the bench's own options as text.
        plot: file for a picture, where the bench has one.

    Raises:
        InvalidArgument: an option is unknown or its value wrong.
    """
    module = importlib.import_module(_MODULES[name])
    options = _options(module.Options, arguments)
    if plot is not None:
        # What a picture needs is missed before the bench runs, not after it.
        importlib.import_module("bench.pictures")
    result: BenchResult = asyncio.run(module.measure(options))
    if plot is not None:
        module.plot(result, plot)
    return result.as_dict()


def _options(kind: type[Any], arguments: Mapping[str, str]) -> Any:
    known = {name: field.type for name, field in kind.__dataclass_fields__.items()}
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in known:
            raise InvalidArgument(f"{name} is no option of this bench; there are: {', '.join(known)}", name)
        try:
            given[name] = known[name](value)
        except ValueError as error:
            raise InvalidArgument(f"{name} is {value!r}", name) from error
    return kind(**given)
