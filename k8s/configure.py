"""Writes the ConfigMaps' env files from the settings classes: `make k8s-config`.

`BASE` has the settings of each service in `k8s/base`, each value checked by the service's own settings class. Overlays
merge further values into these ConfigMaps; `tests/k8s` checks them the same way.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic_settings import BaseSettings

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider.serving.variables import PREFIX
from target_service.settings import TargetSettings

FOLDER: Final = Path(__file__).parent / "base" / "config"
KINDS: Final[Mapping[str, type[BaseSettings]]] = {
    "draft": DraftSettings,
    "orchestrator": OrchestratorSettings,
    "target": TargetSettings,
}
GRPC_PORT: Final = 50051
HTTP_PORT: Final = 8000
METRICS_PORT: Final = 9090

_EVERY: Final = {"address": f"0.0.0.0:{GRPC_PORT}", "metrics_address": f"0.0.0.0:{METRICS_PORT}"}
BASE: Final[Mapping[str, Mapping[str, str]]] = {
    "draft": {**_EVERY, "drain_budget_s": "20", "device": "auto", "drafter": "model"},
    "orchestrator": {
        **_EVERY,
        "http_address": f"0.0.0.0:{HTTP_PORT}",
        "drain_budget_s": "120",
        "targets": "kubernetes:///target:grpc",
        "drafts": "kubernetes:///draft:grpc",
        # New connections find new pods, and a client library that reconnects resumes where it was.
        "max_connection_age_s": "1800",
    },
    "target": {**_EVERY, "drain_budget_s": "120", "device": "auto"},
}


def env_file(service: str) -> str:
    """Return a service's env file; each setting is explained above its line."""
    kind = KINDS[service]
    kind(**BASE[service])
    lines = [f"# Written by k8s/configure.py from the settings of the {service}; change it there."]
    for name, value in BASE[service].items():
        lines += [f"# {kind.model_fields[name].description}", f"{PREFIX}{name.upper()}={value}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for service in KINDS:
        (FOLDER / f"{service}.env").write_text(env_file(service))
