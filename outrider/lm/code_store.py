"""Compiled code on disk, by its key: a start that finds it neither traces the layers nor compiles them."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.cache import cache_dir
from outrider.lm.compiled_function import CompiledFunction

_LOG: Final = logging.getLogger(__name__)
_FACTS: Final = "facts.json"


def save_code(key: str, runs: Sequence[object], facts: Mapping[str, Any]) -> None:
    """Keep functions; do nothing where one of them is no library, or the folder cannot be written.

    Args:
        key: what they were made from; see `code_key`.
        runs: the functions.
        facts: what their caller needs, for JSON.
    """
    libraries = [run.library for run in runs if isinstance(run, CompiledFunction)]
    if len(libraries) != len(runs):
        return
    folder = _folder(key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        contents = [library.read_bytes() for library in libraries]
        # Files that other processes have loaded are replaced, never changed; the facts name the bytes.
        for number, content in enumerate(contents):
            _replace(_library(folder, number), content)
        kept = {"digests": [hashlib.sha256(content).hexdigest() for content in contents], "facts": facts}
        _replace(folder / _FACTS, json.dumps(kept).encode())
    except (OSError, TypeError, ValueError) as error:
        _LOG.debug("compiled code is not kept: %s", error)


def load_code(key: str) -> tuple[list[CompiledFunction], dict[str, Any]] | None:
    """Return the functions with a key, and their facts; None where none were kept, or files are not as they were."""
    folder = _folder(key)
    try:
        kept = json.loads((folder / _FACTS).read_bytes())
        libraries = [_library(folder, number) for number in range(len(kept["digests"]))]
        if [hashlib.sha256(library.read_bytes()).hexdigest() for library in libraries] != kept["digests"]:
            return None
        return [CompiledFunction(library) for library in libraries], dict(kept["facts"])
    except (OSError, ImportError, ValueError, KeyError, TypeError) as error:
        _LOG.debug("no compiled code to load: %s", error)
        return None


def _folder(key: str) -> Path:
    return cache_dir() / "compiled" / "kept" / key


def _library(folder: Path, number: int) -> Path:
    return folder / f"{number}.so"


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
        made.write(content)
    os.replace(made.name, path)
