"""The benchmarks by name, and how they are run by `outrider bench`."""

import ast
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
        "agents",
        "grammar",
        "takeover",
        "commits",
        "orchestrator",
        "http",
        "distance",
        "capacity",
        "sweep",
        "outage",
        "rollout",
        "fleet",
        "vllm",
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all benchmarks."""
    return tuple(_MODULES)


def summaries() -> dict[str, str]:
    """Return the first sentence of each benchmark's docstring, by name, without importing any."""
    sources = {name: Path(__file__).with_name(f"{name}.py").read_text() for name in _MODULES}
    docstrings = {name: ast.get_docstring(ast.parse(source)) or "" for name, source in sources.items()}
    return {name: text.partition("\n")[0].removesuffix(".") for name, text in docstrings.items()}


def run(name: str, *, arguments: Mapping[str, str], plot: Path | None = None) -> dict[str, Any]:
    """Run a benchmark and return its result as JSON values; see `BenchResult`.

    Args:
        name: one of `names()`.
        arguments: options of the benchmark as text, by name.
        plot: PNG file for a plot of the result, if any.

    Raises:
        InvalidArgument: an option is unknown or its value wrong.
    """
    module = importlib.import_module(_MODULES[name])
    options = _options(module.Options, arguments)
    if plot is not None:
        # Missing plot libraries are reported before the benchmark runs.
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
            raise InvalidArgument(
                f"{name} is not an option of this benchmark; the options are {', '.join(known)}", name
            )
        try:
            given[name] = known[name](value)
        except ValueError as error:
            raise InvalidArgument(f"{name} is {value!r}", name) from error
    return kind(**given)
