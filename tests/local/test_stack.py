import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.errors import InvalidArgument, Unavailable
from outrider.local.process import ProcessSpec
from outrider.local.stack import LocalStack
from outrider.local.stack_options import DraftOptions, StackOptions

MODULE = "tests.local.trivial_service"


class TrivialOptions(StackOptions):
    """A stack whose services do nothing."""

    def _spec(self, name: str, module: str, settings: Mapping[str, str]) -> ProcessSpec:
        spec = super()._spec(name, module, settings)
        return ProcessSpec(name, MODULE, spec.environment, spec.drain_budget_s)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def options(**values: object) -> StackOptions:
    return TrivialOptions(**{"model": "toy", "redis_url": "redis://127.0.0.1:1", **values})  # type: ignore[arg-type]


async def test_everything_comes_up_and_goes_down() -> None:
    lines: list[tuple[str, str]] = []
    stack = LocalStack(options(num_targets=2, num_orchestrators=2), progress=lambda *line: lines.append(line))
    async with stack:
        assert [process.spec.name for process in stack.processes] == [
            "orchestrator-0",
            "orchestrator-1",
            "draft-ngram-0",
            "target-0",
            "target-1",
        ]
        assert all(process.is_running for process in stack.processes)
        assert stack.addresses == ("127.0.0.1:4242",) * 2
        assert stack.orchestrators[0].spec.environment["OUTRIDER_TARGETS"] == "127.0.0.1:4242,127.0.0.1:4242"
        assert stack.orchestrators[0].spec.environment["OUTRIDER_REDIS_URL"] == "redis://127.0.0.1:1"
    assert not any(process.is_running for process in stack.processes)
    assert ("target-1", "ready at 127.0.0.1:4242") in lines
    await stack.close()


def test_it_is_a_synchronous_context_manager_too() -> None:
    with LocalStack(options()) as stack:
        assert all(process.is_running for process in stack.processes)
    assert not any(process.is_running for process in stack.processes)


async def test_a_service_that_dies_early_ends_the_others() -> None:
    stack = LocalStack(options(target_environment={"TRIVIAL": "dies"}))
    with pytest.raises(Unavailable, match=r"target-0 ended with exit code 1(.|\n)*no such model: nonsense"):
        await stack.start()
    assert not any(process.is_running for process in stack.processes)
    assert stack.orchestrators == []


async def test_a_service_that_is_never_ready_is_given_up() -> None:
    stack = LocalStack(options(orchestrator_environment={"TRIVIAL": "never ready"}, ready_timeout_s=3))
    with pytest.raises(Unavailable, match=r"orchestrator-0 is not ready after 3 s"):
        await stack.start()
    assert not any(process.is_running for process in stack.processes)


def test_only_the_latest_runs_are_kept_and_those_that_may_still_be_in_use(cache: Path) -> None:
    runs = cache / "outrider" / "runs"
    for _ in range(23):
        LocalStack(options())
    assert len(list(runs.iterdir())) == 23
    for run in runs.iterdir():
        os.utime(run, (0, 0))
    LocalStack(options())
    assert len(list(runs.iterdir())) == 20


def test_each_draft_gets_its_settings() -> None:
    drafts = (
        DraftOptions(num_replicas=2),
        DraftOptions("layers", num_layers=3),
        DraftOptions("model", model="small", num_threads=2, environment={"OUTRIDER_MAX_NODES": "8"}),
    )
    specs = {
        spec.name: spec.environment
        for spec in StackOptions(model="large", dtype="float32", drafts=drafts).draft_specs()
    }
    assert set(specs) == {"draft-ngram-0", "draft-ngram-1", "draft-layers-0", "draft-model-0"}
    assert "OUTRIDER_MODEL" not in specs["draft-ngram-0"]
    layers, model = specs["draft-layers-0"], specs["draft-model-0"]
    assert (layers["OUTRIDER_MODEL"], layers["OUTRIDER_NUM_LAYERS"], layers["OUTRIDER_DTYPE"]) == (
        "large",
        "3",
        "float32",
    )
    assert (model["OUTRIDER_MODEL"], model["OUTRIDER_NUM_THREADS"], model["OUTRIDER_MAX_NODES"]) == (
        "small",
        "2",
        "8",
    )


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (DraftOptions, {"drafter": "magic"}, "drafter"),
        (DraftOptions, {"drafter": "model"}, "draft_model"),
        (DraftOptions, {"drafter": "layers", "num_layers": 0}, "num_layers"),
        (StackOptions, {"num_targets": 0}, "num_targets"),
        (StackOptions, {"num_orchestrators": 0}, "num_orchestrators"),
        (StackOptions, {"model": "./nope"}, "model"),
        (StackOptions, {"tensor_parallel": 0}, "tensor_parallel"),
        (StackOptions, {"address": "localhost"}, "address"),
        (StackOptions, {"http_address": "127.0.0.1:8000", "num_orchestrators": 2}, "http_address"),
        (StackOptions, {"http_address": "127.0.0.1:8000", "address": "127.0.0.1:8000"}, "http_address"),
    ],
)
def test_options_are_checked(kind: type, values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        kind(**values)
    assert caught.value.field == field


UP = """
from dataclasses import fields
from outrider.cli import up
from tests.local.test_stack import TrivialOptions
run = up._run
up._run = lambda options: run(TrivialOptions(**{item.name: getattr(options, item.name) for item in fields(options)}))
from outrider.cli.main import main
main()
"""
"""`outrider up` with services that do nothing."""


def test_up_prints_what_to_try_and_drains_at_ctrl_c() -> None:
    arguments = ["up", "--model", "toy", "--redis-url", "redis://:secret@127.0.0.1:1", "--served-model-name", "pet"]
    with subprocess.Popen(
        [sys.executable, "-c", UP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        lines = [up.stdout.readline() for _ in range(11)]
        up.send_signal(signal.SIGINT)
        _, error = up.communicate(timeout=20)
    assert lines[0].split() == ["redis", "redis://:***@127.0.0.1:1"]
    # The trivial service says that it listens on all hosts.
    assert lines[3].split() == ["orchestrator-0", "0.0.0.0:4242", "http://0.0.0.0:4343"]
    body = '{"model": "pet", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    assert [line.strip() for line in lines[5:]] == [
        "ready; try:",
        "outrider chat --address 127.0.0.1:4242",
        'outrider generate "Once upon a time" --address 127.0.0.1:4242',
        f"curl http://127.0.0.1:4343/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        'from openai import OpenAI; client = OpenAI(base_url="http://127.0.0.1:4343/v1", api_key="-")',
        "http://127.0.0.1:4343/docs",
    ]
    assert up.returncode == 0
    assert "port 50050 is taken: using 0.0.0.0:4242" in error
    assert error.endswith("draining\n")


async def test_orchestrators_listen_where_they_are_told_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = LocalStack(options(num_orchestrators=2, address=f"127.0.0.1:{port}+", http_address=f"[::1]:{port}+"))
        async with stack:
            places = [process.spec.environment["OUTRIDER_ADDRESS"] for process in stack.orchestrators]
            web = [process.spec.environment["OUTRIDER_HTTP_ADDRESS"] for process in stack.orchestrators]
            assert stack.addresses == ("127.0.0.1:4242",) * 2
            assert (stack.http_addresses, stack.base_url) == (("127.0.0.1:4343",) * 2, "http://127.0.0.1:4343/v1")
    assert len({*places, *web}) == 4
    assert f"127.0.0.1:{port}" not in places


async def test_a_stack_has_no_http_unless_it_is_told_to() -> None:
    async with LocalStack(options()) as stack:
        assert stack.orchestrators[0].spec.environment["OUTRIDER_HTTP_ADDRESS"] == ""
        assert (stack.http_addresses, stack.base_url) == ((), "")


async def test_a_port_that_is_taken_ends_the_start_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        stack = LocalStack(options(address=address))
        with pytest.raises(Unavailable, match=f"cannot listen on {address}: the port is taken"):
            await stack.start()
    assert stack.targets == []


async def test_drafts_wait_for_verdicts_beside_a_target_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalStack(options()) as stack:
        assert stack.orchestrators[0].spec.environment["OUTRIDER_LOOKAHEAD"] == "0"
    async with LocalStack(options(orchestrator_environment={"OUTRIDER_LOOKAHEAD": "7"})) as stack:
        assert stack.orchestrators[0].spec.environment["OUTRIDER_LOOKAHEAD"] == "7"
    monkeypatch.setenv("OUTRIDER_LOOKAHEAD", "9")
    async with LocalStack(options()) as stack:
        assert "OUTRIDER_LOOKAHEAD" not in stack.orchestrators[0].spec.environment


def test_published_heads_get_the_target_of_the_stack(tmp_path: Path) -> None:
    (spec,) = StackOptions(model="org/large", drafts=(DraftOptions("eagle3", "org/head"),)).draft_specs()
    assert (spec.environment["OUTRIDER_MODEL"], spec.environment["OUTRIDER_TARGET"]) == ("org/head", "org/large")
    (tmp_path / "outrider_draft.json").write_text("{}")
    (spec,) = StackOptions(drafts=(DraftOptions("eagle3", str(tmp_path)),)).draft_specs()
    assert "OUTRIDER_TARGET" not in spec.environment
