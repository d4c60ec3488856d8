"""The compose file, with its variables filled in; and what it describes, run on this machine without containers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from outrider.local import valkey
from tests.project import dockerfile

COMPOSE = dockerfile.ROOT / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_LISTENING = re.compile(r"0\.0\.0\.0:(\d+)")


def load(variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns the file as compose reads it in an environment with these variables: parsed first, then filled in."""

    def filled(item: Any) -> Any:
        if isinstance(item, str):
            return _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2] or "", item)
        if isinstance(item, dict):
            return {key: filled(value) for key, value in item.items()}
        return [filled(value) for value in item] if isinstance(item, list) else item

    loaded: dict[str, Any] = filled(yaml.safe_load(COMPOSE.read_text()))
    return loaded


def is_ours(service: Mapping[str, Any]) -> bool:
    """Whether a service runs from this project's image."""
    return "build" in service


def environment(service: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables of a service's container: the image's, then its own."""
    return dockerfile.environment(service["build"]["target"]) | service.get("environment", {})


def listening(service: Mapping[str, Any]) -> set[int]:
    """Returns the ports at which a service of ours listens."""
    return {int(port) for value in environment(service).values() for port in _LISTENING.findall(value)}


def exec_form(text: str) -> list[str]:
    """Returns the command of an instruction such as CMD ["up"]."""
    command: list[str] = json.loads(text)
    return command


@dataclass(slots=True)
class Machine:
    """Runs containers' commands as processes of this machine: names of services become ports of the loopback address.

    Attributes:
        folder: for what containers have in volumes.
        ports: here, by service and port there.
        processes: by service.
    """

    folder: Path
    ports: dict[tuple[str, int], int] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def port(self, service: str, port: int) -> int:
        """Returns the port here of a service's port."""
        if (service, port) not in self.ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[service, port] = probe.getsockname()[1]
        return self.ports[service, port]

    def variables(self, name: str, given: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
        """Returns the environment here of a container."""

        def here(value: str) -> str:
            value = _LISTENING.sub(lambda found: f"127.0.0.1:{self.port(name, int(found[1]))}", value)
            pattern = rf"(?<=/)({'|'.join(names)}):(\d+)" if names else r"(?!)"
            return re.sub(pattern, lambda found: f"127.0.0.1:{self.port(found[1], int(found[2]))}", value)

        own = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")}
        bound = {key: here(value) for key, value in given.items() if key != "PATH"}
        path = os.pathsep.join([str(Path(sys.executable).parent), own["PATH"]])
        return own | bound | {"PATH": path, "XDG_CACHE_HOME": str(self.folder), "OUTRIDER_LOG_FORMAT": "text"}

    @contextmanager
    def running(
        self, name: str, command: list[str], variables: Mapping[str, str]
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """Runs a command within the block; then ends it as a container is ended, and expects that it ends well."""
        log = self.folder / f"{name}.log"
        with (
            log.open("wb") as output,
            subprocess.Popen(command, env=variables, stdout=output, stderr=output) as process,
        ):
            self.processes[name] = process
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    code = process.wait(30)
                finally:
                    process.kill()
        assert code == 0, (name, code, log.read_text())

    def until_healthy(self, name: str, check: list[str], variables: Mapping[str, str]) -> None:
        """Repeats a health check until it passes, as Docker does."""
        give_up = time.monotonic() + 60
        while subprocess.run(check, env=variables, stdout=subprocess.DEVNULL, check=False).returncode:
            assert self.processes[name].poll() is None, (self.folder / f"{name}.log").read_text()
            assert time.monotonic() < give_up, (self.folder / f"{name}.log").read_text()

    @contextmanager
    def up(self, loaded: Mapping[str, Any]) -> Iterator["Machine"]:
        """Runs all services of a compose file within the block, each once those are healthy that it waits for."""
        names = tuple(loaded["services"])
        with ExitStack() as stack:
            checks: dict[str, tuple[list[str], dict[str, str]]] = {}
            for name, service in loaded["services"].items():
                for needed, condition in service.get("depends_on", {}).items():
                    assert condition == {"condition": "service_healthy"}
                    self.until_healthy(needed, *checks[needed])
                given = environment(service) if is_ours(service) else service.get("environment", {})
                variables = self.variables(name, given, names)
                command, check = self._commands(name, service)
                checks[name] = check, variables
                stack.enter_context(self.running(name, command, variables))
            for name in names:
                self.until_healthy(name, *checks[name])
            yield self

    def _commands(self, name: str, service: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Returns how a container is started and checked, here."""
        command = [*service.get("entrypoint", ()), *service["command"]]
        kind, *check = service["healthcheck"]["test"]
        assert kind == "CMD"
        if is_ours(service):
            return command, check
        assert (command[0], check) == ("valkey-server", ["valkey-cli", "ping"])
        port = self.port(name, 6379)
        programs = valkey._executable().parent
        server = [str(programs / command[0]), *command[1:], "--bind", "127.0.0.1", "--port", str(port)]
        return [*server, "--dir", str(self.folder)], [str(programs / check[0]), "-p", str(port), *check[1:]]
