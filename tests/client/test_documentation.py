"""The snippets of the documentation that use the Python client, each run as it stands but for the address."""

import contextlib
import io
import subprocess
import sys

import pytest

import outrider
from tests.client.scripted import WORDS, ScriptedService
from tests.docs.pages import ROOT, blocks

SNIPPETS = [
    block.text
    for name in ("docs/python.md", "docs/quickstart.md", "README.md")
    for block in blocks(ROOT / name)
    if block.language == "python" and "from outrider import" in block.text
]
SERVED = [snippet for snippet in SNIPPETS if "LocalStack" not in snippet]
TEXT = "".join(WORDS)


def test_there_are_snippets_of_both_kinds() -> None:
    assert len(SERVED) == 8
    assert len(SNIPPETS) == 9


@pytest.mark.parametrize("snippet", SERVED)
def test_a_snippet_prints_what_is_generated(snippet: str, service: ScriptedService) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(snippet.replace("127.0.0.1:50050", service.address), {"outrider": outrider})
    assert TEXT in printed.getvalue()
    assert service.requests


@pytest.mark.slow
@pytest.mark.embedded
def test_the_stack_of_its_own_generates() -> None:
    (snippet,) = set(SNIPPETS) - set(SERVED)
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10
