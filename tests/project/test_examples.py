"""The scripts of examples/, each run as a person runs it, against one stack of Markov models."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from outrider import DraftOptions, LocalStack, StackOptions
from tests.served.stacks import until_one_draft_is_in_rotation

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = "markov:text=1,seed=5"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack() -> AsyncIterator[LocalStack]:
    """A target, a draft that is good, and an orchestrator with HTTP."""
    options = StackOptions(
        model=TARGET,
        drafts=(DraftOptions("model", f"{TARGET},noise=0.2"),),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "5"},
        http_address="127.0.0.1:0",
    )
    async with LocalStack(options) as running:
        async with running.client() as client:
            await until_one_draft_is_in_rotation(client)
        yield running


def run(name: str, address: str) -> str:
    """Returns what a script prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), address],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_openai_stream(stack: LocalStack) -> None:
    address = f"http://{stack.http_addresses[0]}"
    answers = []
    # The text is drawn anew each time, and one in some hundred ends at once.
    while not any(answers) and len(answers) < 4:
        answer, _, last = run("openai_stream.py", address).rstrip("\n").rpartition("\n\n")
        answers.append(answer)
        counted = re.fullmatch(r"(\d+) tokens by markov\S*", last)
        assert counted is not None
        # A token of this model is a byte; the one that ends the text is none.
        assert len(answer.encode()) <= int(counted[1]) <= 80
    assert any(answers)


def test_conversation(stack: LocalStack) -> None:
    printed = run("conversation.py", stack.addresses[0])
    assert printed.count("> ") >= 3
    found = re.search(r"^session \w+: (\d+) tokens were still in the KV cache$", printed, re.MULTILINE)
    assert found is not None
    # Two questions, and at most as many tokens of their answers; a token of this model is a byte.
    assert int(found[1]) > len("My name is Ada, and I write programs.What could I write next?")


def test_many_requests(stack: LocalStack) -> None:
    printed = run("many_requests.py", stack.addresses[0])
    assert re.search(r"^8 requests, 4 at once: (\d+) tokens, \d+ a second$", printed, re.MULTILINE)
    assert len(re.findall(r"^\w+: ['\"]", printed, re.MULTILINE)) == 8


def test_resume_stream(stack: LocalStack) -> None:
    printed = run("resume_stream.py", f"http://{stack.http_addresses[0]}")
    assert re.search(r"^\.\.\. the connection broke behind \S+:\d+ \.\.\.$", printed, re.MULTILINE)
    assert printed.endswith("the same text as without a break: yes\n")


def test_token_origins(stack: LocalStack) -> None:
    found: dict[str, int] = {}
    # On a busy machine so short a request can end before its draft is ready.
    for _ in range(5):
        *tokens, counts = run("token_origins.py", f"http://{stack.http_addresses[0]}").splitlines()[1:]
        found = {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", counts)}
        assert found.keys() <= {"accepted", "recovered", "bonus"}
        assert sum(found.values()) == len(tokens) <= 40
        if "accepted" in found:
            break
    assert "accepted" in found


def test_compare_speculation(stack: LocalStack) -> None:
    printed = run("compare_speculation.py", stack.addresses[0])
    found = re.findall(r"(\d+) target passes, (\d+) of (\d+) drafted", printed)
    (passes, accepted, _), (plain_passes, *nothing) = found
    assert int(accepted) > 0
    assert int(passes) < int(plain_passes)
    assert nothing == ["0", "0"]
    assert printed.endswith("the same text 6 times: yes\n")


def test_all_examples_are_listed_and_tested() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert scripts == {f"{name.removeprefix('test_')}.py" for name in globals() if name.startswith("test_")} - {
        "all_examples_are_listed_and_tested.py"
    }
