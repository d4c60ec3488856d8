import signal
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


def test_only_the_latest_runs_are_kept(cache: Path) -> None:
    for _ in range(23):
        LocalStack(options())
    assert len(list((cache / "outrider" / "runs").iterdir())) == 20


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
    ],
)
def test_options_are_checked(kind: type, values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        kind(**values)
    assert caught.value.field == field


def test_up_prints_addresses_and_drains_at_ctrl_c() -> None:
    program = """
from dataclasses import fields
from outrider.cli import up
from tests.local.test_stack import TrivialOptions
run = up._run
up._run = lambda options: run(TrivialOptions(**{item.name: getattr(options, item.name) for item in fields(options)}))
from outrider.cli.main import main
main(["up", "--model", "toy", "--redis-url", "redis://:secret@127.0.0.1:1"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        lines = [up.stdout.readline() for _ in range(6)]
        up.send_signal(signal.SIGINT)
        _, error = up.communicate(timeout=20)
    assert lines[0].split() == ["redis", "redis://:***@127.0.0.1:1"]
    assert lines[-1] == 'ready; try: outrider generate "Once upon a time" --address 127.0.0.1:4242\n'
    assert (up.returncode, error) == (0, "draining\n")


def test_a_targets_workers_do_not_spin_for_long_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert [spec.environment["GOMP_SPINCOUNT"] for spec in options().target_specs()] == ["20000"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert [spec.environment["GOMP_SPINCOUNT"] for spec in options().target_specs()] == ["7"]
