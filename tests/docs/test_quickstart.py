"""Every command of README.md and the quickstart: run here against real services, or elsewhere, which is listed."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, commands
from tests.training.models import save_target, save_tokenizer

README: Final = ROOT / "README.md"
QUICKSTART: Final = DOCS / "quickstart.md"
GRPC: Final = "127.0.0.1:50050"
HTTP: Final = "127.0.0.1:8000"
ELSEWHERE: Final[Mapping[str, str]] = {
    "make test": ".ci/run",
    "outrider up --model Qwen/Qwen3-8B": "tests/lm/test_hub.py",
    "docker build -t outrider:local .": "tests/k8s/test_images.py",
    "docker compose up": "tests/project/test_compose.py",
    "docker build --target orchestrator -t outrider/orchestrator:local .": "tests/k8s/test_images.py",
    "kubectl apply -k k8s/overlays/local": "tests/k8s/test_manifests.py",
    "kubectl apply -k k8s/overlays/production": "tests/k8s/test_manifests.py",
}
"""Commands that no test here runs, and what does: images are checked without a builder, manifests without a cluster."""

OF_MODELS: Final = (
    "outrider up --model ./llama",
    "outrider up --model ./llama --draft-model ./small-llama",
    "outrider distill ./llama ./draft --budget 8h",
)
TO_SERVICES: Final = ("curl ", "outrider chat --address", "outrider generate", "outrider info")
ALONE: Final = ("make demo", "outrider chat", "outrider generate 'Why is the sky blue?' --chat --color")
SERVERS: Final = ("outrider up", "outrider up --num-targets 2")
KILL: Final = "kill -9 PROCESS_ID"
LONG: Final = "outrider generate 'Tell a long story.'"


def lines_of(page: Path) -> list[str]:
    """Returns the commands of a page as a shell takes them, without the folder of the program."""
    shells = [block for block in blocks(page) if block.language in ("sh", "")]
    return [shlex.join(words).replace(".venv/bin/", "") for block in shells for words in commands(block)]


def test_every_command_is_run_somewhere() -> None:
    for line in (*lines_of(README), *lines_of(QUICKSTART)):
        is_run = line in (*OF_MODELS, *ALONE, *SERVERS, KILL) or (line.startswith(TO_SERVICES) and "127.0.0.1" in line)
        assert is_run or line in ELSEWHERE, f"{line}: nothing runs it"
    for place in ELSEWHERE.values():
        assert (ROOT / place).exists()


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(1800)
def test_the_quickstart(tmp_path: Path) -> None:
    lines = [line for line in lines_of(QUICKSTART) if line.startswith(TO_SERVICES) and not line.startswith(LONG)]
    assert len(lines) == 7
    with serving("outrider up", tmp_path) as (grpc, http):
        for line in lines:
            printed = run(line.replace(GRPC, grpc).replace(HTTP, http), tmp_path)
            assert len(printed) > 40, line
        for block in blocks(QUICKSTART):
            if block.language == "python":
                code = block.text.replace(GRPC, grpc).replace(HTTP, http)
                assert len(run(shlex.join(["python", "-c", code]), tmp_path)) > 40


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(1800)
def test_a_killed_target_changes_nothing(tmp_path: Path) -> None:
    (line,) = [line for line in lines_of(QUICKSTART) if line.startswith(LONG)]
    with serving("outrider up --num-targets 2", tmp_path) as (grpc, _):
        line = line.replace(GRPC, grpc)
        undisturbed = run(line, tmp_path)
        with subprocess.Popen(
            translated(line), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as generating:
            os.kill(process_id_of_the_generating_target(grpc, tmp_path), signal.SIGKILL)
            printed, figures = generating.communicate(timeout=600)
    assert printed == undisturbed
    assert "recomputed" in figures


def process_id_of_the_generating_target(grpc: str, folder: Path) -> int:
    """Returns it once a target generates, as the quickstart has it found."""
    for _ in range(60):
        targets = run(f"outrider info --address {grpc}", folder).partition("draft ")[0].split("target ")
        for target in targets:
            if "1 generating" in target:
                return int(re.findall(r"replica\W+\S*-(\d+)", target)[0])
    raise AssertionError("no target generates")


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", ALONE)
def test_commands_that_start_services_of_their_own(line: str, tmp_path: Path) -> None:
    # What `make demo` does behind its installation.
    assert len(run(line.replace("make demo", "outrider demo"), tmp_path)) > 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_models_of_ones_own(tmp_path: Path) -> None:
    for name in ("llama", "small-llama"):
        save_target(tmp_path / name)
        save_tokenizer(tmp_path / name)
    # A day's training in seconds.
    run(OF_MODELS[2].replace("8h", "5s") + " --conversations 16 --vocabulary 48 --depth 2", tmp_path)
    for line in (*OF_MODELS[:2], "outrider up --model ./llama --draft-model ./draft"):
        with serving(line, tmp_path) as (grpc, _):
            run(f"outrider generate 'w1 w2' --max-tokens 8 --address {grpc}", tmp_path)
            assert "target" in run(f"outrider info --address {grpc}", tmp_path)


def run(line: str, folder: Path) -> str:
    """Runs a command in a folder, with a question on its standard input; returns what it prints."""
    question = "Why is the sky blue?\n"
    done = subprocess.run(
        translated(line), cwd=folder, env=environment(), input=question, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout


@contextmanager
def serving(line: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Runs `outrider up`; yields the addresses that it prints, of gRPC and of HTTP."""
    with subprocess.Popen(
        translated(line), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        printed = ""
        while "ready; try:" not in printed:
            read = process.stdout.readline()
            assert read, f"{line} ended: {printed}"
            printed += read
        found = re.search(r"^orchestrator-0 +(\S+) +http://(\S+)", printed, re.MULTILINE)
        assert found is not None
        try:
            yield found[1], found[2]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0


def translated(line: str) -> Sequence[str]:
    """Returns a command for this interpreter."""
    words = shlex.split(line)
    replaced = {"outrider": [sys.executable, "-m", "outrider"], "python": [sys.executable]}
    return [*replaced.get(words[0], words[:1]), *words[1:]]


def environment() -> dict[str, str]:
    """Returns the environment, with this tree's packages."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}
