"""An orchestrator with HTTP, whose scripted target has text: a token for each byte, and a chat template."""

from collections.abc import AsyncIterator

import httpx
import pytest

from orchestrator.text.tokenizer import Tokenizer
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer, printable_tokens
from tests.orchestrator.answering import give_answers, model_files
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator, orchestrating
from tests.orchestrator.text.templates import QWEN, WITH_TOOLS

LETTERS = printable_tokens()[-26:]


def letter(tokens: list[int]) -> int:
    """The next token: a printable one, by the position and the token before; never the end of the text."""
    return LETTERS[(7 * len(tokens) + 31 * tokens[-1]) % len(LETTERS)]


def give_text(target: ScriptedTarget) -> None:
    """Gives a target a tokenizer and a chat template."""
    files = byte_tokenizer()
    target.files = dict(files.files)
    target.next_token = letter
    target.info.model = "/models/letters"
    target.info.tokenizer_fingerprint = files.fingerprint
    target.info.vocabulary_size = VOCABULARY_SIZE
    target.info.grammar_library = "llguidance"
    del target.info.eos_token_ids[:]
    target.info.eos_token_ids.append(EOS)


@pytest.fixture
async def texting(session_store_url: str, target: ScriptedTarget) -> AsyncIterator[Orchestrator]:
    """The orchestrator; `target` is its target."""
    give_text(target)
    async with orchestrating(session_store_url, (target,), http_address="127.0.0.1:0") as running:
        yield running


@pytest.fixture
async def http(texting: Orchestrator) -> AsyncIterator[httpx.AsyncClient]:
    """A client of its HTTP API."""
    async with texting.http_client() as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The target's tokenizer."""
    files = byte_tokenizer().files
    template = files["chat_template.jinja"].decode()
    return Tokenizer(files["tokenizer.json"].decode(), template, {"bos_token": None, "eos_token": "<|im_end|>"})


CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


def said(prompt: str) -> str:
    """The answer of `answering`: JSON where the prompt wants it, a result where a tool gave it, else calls."""
    if "as JSON" in prompt:
        return '<think>\nHm.\n</think>\n\n{"sum": 4}'
    if "<|im_start|>tool\n" in prompt:
        return "<think>It says 4.</think>The sum is 4."
    if "only calls" in prompt:
        return f"{CALLS}\n{CALLS}"
    if "Tools:" in prompt:
        return f"<think>\nAdd them.\n</think>\n\nLet me see.\n{CALLS}\n{CALLS}"
    return "<think>\nEasy.\n</think>\n\nFour."


@pytest.fixture
async def answering(session_store_url: str, target: ScriptedTarget) -> AsyncIterator[Orchestrator]:
    """An orchestrator whose target reasons, calls tools and writes JSON."""
    give_answers(target, model_files(WITH_TOOLS, QWEN), said)
    more = {"http_address": "127.0.0.1:0", "served_model_names": ("answers",)}
    async with orchestrating(session_store_url, (target,), **more) as running:
        yield running


@pytest.fixture
async def asker(answering: Orchestrator) -> AsyncIterator[httpx.AsyncClient]:
    """A client of its HTTP API."""
    async with answering.http_client() as client:
        yield client
