"""Command lines to copy, for a stack that runs or one to start."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_QUESTION: Final = "Why is the sky blue?"


def program() -> str:
    """Return how a user starts this program: by its name where the shell finds that, else as it was started."""
    started_as = Path(sys.argv[0])
    if started_as.name != "outrider" or shutil.which("outrider"):
        return "outrider"
    return shlex.quote(str(started_as))


def grpc_lines(addresses: Sequence[str]) -> Iterator[str]:
    """Yield what to try at orchestrators."""
    options = " ".join(f"--address {address}" for address in addresses)
    yield f"{program()} chat {options}"
    yield f'{program()} generate "Once upon a time" {options}'


def http_lines(base_url: str, model: str) -> Iterator[str]:
    """Yield what to try at the HTTP API.

    Args:
        base_url: such as http://127.0.0.1:8000/v1.
        model: a name under which it serves the model.
    """
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": _QUESTION}]}, ensure_ascii=False)
    yield f"curl {base_url}/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    yield f'from openai import OpenAI; client = OpenAI(base_url="{base_url}", api_key="-")'
    yield f"{base_url.removesuffix('/v1')}/docs"


def served_name(model: str, names: Sequence[str]) -> str:
    """Return a name under which the HTTP API serves the model: the first of `names`, else the service's default."""
    if names:
        return names[0]
    return Path(model).resolve().name if Path(model).is_dir() else model
