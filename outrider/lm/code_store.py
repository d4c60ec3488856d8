"""Compiled code on disk, by its key: a start that finds it neither traces the layers nor compiles them."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.cache import cache_dir
from outrider.lm.compiled_function import CompiledFunction

_LOG: Final = logging.getLogger(__name__)
_FACTS: Final = "facts.json"
_MAX_FOLDERS: Final = 128
"""Of about 0.3 MB each."""


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
        text = json.dumps(facts)
        kept = {"digests": list(map(_digest, contents)), "facts": text, "digest": _digest(text.encode())}
        _replace(folder / _FACTS, json.dumps(kept).encode())
        _remove_oldest(folder.parent)
    except (OSError, TypeError, ValueError) as error:
        _LOG.debug("compiled code is not kept: %s", error)


def load_code(key: str) -> tuple[list[CompiledFunction], dict[str, Any]] | None:
    """Return the functions with a key, and their facts; None where none were kept, or files are not as they were."""
    folder = _folder(key)
    try:
        kept = json.loads((folder / _FACTS).read_bytes())
        libraries = [_library(folder, number) for number in range(len(kept["digests"]))]
        found = [_digest(library.read_bytes()) for library in libraries]
        if found != kept["digests"] or kept["digest"] != _digest(kept["facts"].encode()):
            return None
        functions, facts = [CompiledFunction(library) for library in libraries], dict(json.loads(kept["facts"]))
        with contextlib.suppress(OSError):
            os.utime(folder)
        return functions, facts
    except (OSError, ImportError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.debug("no compiled code to load: %s", error)
        return None


def _folder(key: str) -> Path:
    return cache_dir() / "compiled" / "kept" / key


def _library(folder: Path, number: int) -> Path:
    return folder / f"{number}.so"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _remove_oldest(parent: Path) -> None:
    """Remove the folders that were not used for longest, where there are too many."""
    folders = sorted(parent.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[_MAX_FOLDERS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
        try:
            made.write(content)
            made.flush()
            Path(made.name).replace(path)
        except OSError:
            Path(made.name).unlink(missing_ok=True)
            raise
