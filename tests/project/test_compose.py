"""The compose file: valid, at one with the image and the services' settings, and serving when its commands are run."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider import AsyncClient
from outrider.discovery.endpoints import DnsPlace, parse_place
from outrider.serving.settings import ServingSettings
from outrider.serving.variables import PREFIX, complaints
from target_service.settings import TargetSettings
from tests.project import compose
from tests.project.dockerfile import DOCKERFILE, ROOT, last

SETTINGS: dict[str, type[ServingSettings]] = {
    "draft": DraftSettings,
    "orchestrator": OrchestratorSettings,
    "target": TargetSettings,
}
MODEL = "markov:text=1,seed=5"
LOADED = compose.load({})
SERVICES: dict[str, Any] = LOADED["services"]
OURS = {name: service for name, service in SERVICES.items() if compose.is_ours(service)}


def check(schema: str, path: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_is_valid(tmp_path: Path) -> None:
    done = check("compose-spec", compose.COMPOSE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(compose.COMPOSE.read_text().replace("restart:", "restarts:"))
    assert check("compose-spec", wrong).returncode == 1


def test_it_has_every_service() -> None:
    assert set(SERVICES) == {"valkey", *SETTINGS}
    assert set(OURS) == set(SETTINGS)
    used = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    assert used == set(LOADED["volumes"])


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_module_from_a_stage_that_there_is(name: str) -> None:
    build = OURS[name]["build"]
    stage = DOCKERFILE[build["target"]]
    declared = {text.partition("=")[0] for other in DOCKERFILE.values() for text in other.values("ARG")}
    assert set(build["args"]) <= declared
    assert (ROOT / build["context"] / "Dockerfile").is_file()
    assert stage.name == list(DOCKERFILE)[-1]
    python, option, module = OURS[name]["entrypoint"]
    assert (python, option) == ("python", "-m")
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    assert module == SETTINGS[name].__module__.partition(".")[0]


@pytest.mark.parametrize("name", OURS)
def test_settings_are_those_of_the_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OURS[name]["environment"]
    kind = SETTINGS[name]
    assert not complaints(compose.environment(OURS[name]), ())
    assert {variable.removeprefix(PREFIX).lower() for variable in own} <= set(kind.model_fields)
    for variable, value in compose.environment(OURS[name]).items():
        assert isinstance(value, str), f"{variable} must be quoted"
        monkeypatch.setenv(variable, value)
    settings = kind()
    grace_s = float(OURS[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.drain_budget_s


def test_ports_agree() -> None:
    settings = SERVICES["orchestrator"]["environment"]
    for variable, needed in (("OUTRIDER_TARGETS", "target"), ("OUTRIDER_DRAFTS", "draft")):
        place = parse_place(settings[variable], "place")
        assert isinstance(place, DnsPlace)
        assert place.host == needed
        assert place.port in compose.listening(OURS[needed])
    assert settings["OUTRIDER_REDIS_URL"] == "redis://valkey:6379/0"
    for name, service in SERVICES.items():
        published = [port.rsplit(":", 2) for port in service.get("ports", ())]
        assert bool(published) == (name == "orchestrator")
        for host, outside, inside in published:
            assert (host, outside) == ("127.0.0.1", inside)
            assert int(inside) in compose.listening(service)
    assert len(SERVICES["orchestrator"]["ports"]) == len(compose.listening(SERVICES["orchestrator"]))


def test_containers_can_do_little() -> None:
    for service in OURS.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert last(service["build"]["target"], "USER") == "10001:10001"


async def test_its_commands_serve(tmp_path: Path) -> None:
    """Runs what the containers run, with their environments; host names become ports of this machine."""
    given = {"MODEL": MODEL, "DRAFTER": "model", "DRAFT_MODEL": f"{MODEL},noise=0.2"}
    machine = compose.Machine(tmp_path)
    with machine.up(compose.load(given)):
        web, grpc = (machine.port("orchestrator", port) for port in (8000, 50050))
        async with AsyncClient(f"127.0.0.1:{grpc}") as client, asyncio.timeout(30):
            while [worker.in_rotation for worker in (await client.list_models()).workers] != [True, True]:
                await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{web}", timeout=30) as http:
            body = {"prompt": "Once upon a time", "max_tokens": 32, "seed": 7}
            # A target this fast may be done before a busy machine runs the draft: that request had no proposals.
            async with asyncio.timeout(30):
                num_spec_steps = 0
                while not num_spec_steps:
                    answer = await http.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["usage"]["completion_tokens"] == 32
                    num_spec_steps = answer.json()["metrics"]["speculative_decoding"]["num_spec_steps"]
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/v1/models", headers={"Host": "page.example"})).status_code == 403


@pytest.mark.slow
def test_the_whole_image_serves(tmp_path: Path) -> None:
    """Runs the entrypoint of the one image with its environment, a small model, and its health check."""
    machine = compose.Machine(tmp_path)
    command = [word for keyword in ("ENTRYPOINT", "CMD") for word in compose.exec_form(last("whole", keyword))]
    assert command == ["outrider", "up"]
    image = {"build": {"target": "whole"}, "environment": {"OUTRIDER_MODEL": MODEL}}
    assert compose.listening(image) <= {int(port) for port in last("whole", "EXPOSE").split()}
    variables = machine.variables("whole", compose.environment(image), ())
    check = compose.exec_form(last("whole", "HEALTHCHECK").partition("CMD ")[2])
    with machine.running("whole", command, variables):
        machine.until_healthy("whole", check, variables)
        url = f"http://127.0.0.1:{machine.port('whole', 8000)}"
        body = {"prompt": "Once upon a time", "max_tokens": 8}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["usage"]["completion_tokens"] == 8
