"""The snippets of the documentation with clients of OpenAI and Ollama, each run as it stands but for the address."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.docs.pages import PAGES, Block, blocks
from tests.orchestrator.http.conftest import give_text
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator, orchestrating

_CLIENTS = ("from openai import", "from ollama import")
SNIPPETS = [
    block for page in PAGES for block in blocks(page) if block.language == "python" and block.text.startswith(_CLIENTS)
]


@pytest.fixture
async def embedded(session_store_url: str, target: ScriptedTarget) -> AsyncIterator[Orchestrator]:
    """An orchestrator that serves text under the name that the snippets have."""
    give_text(target)
    # A token is a byte, also where a prompt tells of tools.
    target.info.max_session_len = 2048
    more = {"http_address": "127.0.0.1:0", "served_model_names": ("embedded",)}
    async with orchestrating(session_store_url, (target,), **more) as running:
        yield running


def test_there_are_such_snippets() -> None:
    assert {block.page for block in SNIPPETS} >= {
        "README.md",
        "docs/quickstart.md",
        "docs/http.md",
        "docs/migrating.md",
        "docs/tools.md",
    }


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda block: block.page)
async def test_a_snippet_gets_an_answer(snippet: Block, embedded: Orchestrator) -> None:
    printed = await asyncio.to_thread(_run, snippet.text.replace("127.0.0.1:8000", str(embedded.http_address)))
    # A letter for each of 64 tokens, or as many as the session takes.
    assert len(printed) > 40


def _run(code: str) -> str:
    """Returns what a snippet prints, or the answer that it leaves."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        answer = names.get("answer")
        return printed.getvalue() or str(answer and answer.choices[0].message.content)
    finally:
        client = names["client"]
        (client if hasattr(client, "close") else client._client).close()
