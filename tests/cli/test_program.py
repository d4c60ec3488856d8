"""The command line as a process: exit codes, Ctrl-C at any moment, readers that go."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.scripted import WORDS, ScriptedService, accepted, delta, finished

OUTRIDER = [sys.executable, "-m", "outrider"]
TEXT = "".join(WORDS)


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OUTRIDER, *arguments], capture_output=True, text=True, timeout=60)


def interrupted(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Press Ctrl-C; return the exit code and standard error."""
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    return process.returncode, error


def test_the_module_is_the_command(service: ScriptedService) -> None:
    done = outrider("generate", "Hello", "--address", service.address, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, TEXT + "\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_alone_it_shows_what_to_begin_with(arguments: tuple[str, ...]) -> None:
    done = outrider(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: outrider [OPTIONS]")
    for line in ("Begin with `outrider demo`", "outrider up  ", "Exit codes: 2"):
        assert line in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("generate",), 2),
        (("generate", "x", "--nonsense"), 2),
        (("generate", "x", "--top-p", "3", "--address", "127.0.0.1:1"), 2),
        (("info", "--address", "localhost"), 2),
        (("info", "--address", "127.0.0.1:1"), 1),
    ],
)
def test_wrong_usage_has_a_code_of_its_own(arguments: tuple[str, ...], code: int) -> None:
    done = outrider(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("outrider: error: ") and done.stderr.count("\n") == 1


def test_an_interrupt_while_modules_are_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    with subprocess.Popen(
        [*OUTRIDER, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        assert interrupted(process) == (130, "")


def test_an_interrupt_while_a_command_waits_is_quiet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [*OUTRIDER, "info", "--address", f"127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            silent.settimeout(20)
            connection, _ = silent.accept()  # now it waits for an answer
            with connection:
                code, error = interrupted(process)
    assert (code, error.strip()) == (130, "")


def test_an_interrupt_after_the_command_is_quiet(tmp_path: Path) -> None:
    program = """
import atexit, sys, time
from outrider.__main__ import main
atexit.register(lambda: (print("leaving", flush=True), time.sleep(60)))
sys.argv = ["outrider", "--version"]
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("outrider")
        assert process.stdout.readline() == "leaving\n"
        assert interrupted(process) == (130, "")


def test_an_ignored_interrupt_stays_ignored(service: ScriptedService) -> None:
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program += "import outrider.__main__ as program; sys.argv = ['outrider', '--version']\n"
    program += "try: program.main()\nexcept SystemExit: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("True\n"), done.stderr


@pytest.mark.parametrize(
    "arguments", [("--help",), ("generate", "x", "--address", "{address}"), ("bench",), ("nonsense",)]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_it_quietly(
    service: ScriptedService, arguments: tuple[str, ...], unbuffered: str
) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*OUTRIDER, *(argument.format(address=service.address) for argument in arguments)],
            stdout=write, stderr=subprocess.PIPE, text=True, timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    finally:
        os.close(write)
    if arguments == ("nonsense",):
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), "it has printed nothing there"
    else:
        assert (done.returncode, done.stderr) == (141, "")


def test_nobody_reads_errors_either() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([*OUTRIDER, "nonsense"], stdout=write, stderr=write, timeout=60)
    finally:
        os.close(write)
    assert done.returncode == 141


def test_a_reader_that_goes_in_the_middle_ends_it_quietly(service: ScriptedService) -> None:
    # Far more than a pipe holds, so that the writer still writes when its reader goes.
    long = delta(0)
    long.delta.text = "word " * 100_000
    service.scripts = [[accepted(), long, finished(1)]]
    command = " ".join(OUTRIDER) + f" generate x --address {service.address} | head -c 4"
    command += '; echo " ${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("word 141\n", "")


def test_a_closed_output_is_none() -> None:
    done = subprocess.run(["bash", "-c", f"{' '.join(OUTRIDER)} --version >&-"], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
