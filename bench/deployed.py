"""What the repository's `k8s` folder deploys, as far as scaling depends on it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench.hpa import Scaler
from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider.errors import InvalidArgument
from outrider.serving.settings import PREFIX
from target_service.settings import TargetSettings

TARGET: Final = "target"
DRAFT: Final = "draft"
ORCHESTRATOR: Final = "orchestrator"
SERVICES: Final = (TARGET, DRAFT, ORCHESTRATOR)
_AVERAGE = re.compile(r"avg_over_time\(.*\[(\w+)\]\)")
_SECONDS: Final = {"s": 1.0, "m": 60.0}


@dataclass(frozen=True, slots=True)
class Deployed:
    """What is deployed.

    Attributes:
        scalers: the HorizontalPodAutoscaler of each service.
        target: settings of targets.
        draft: settings of drafts.
        orchestrator: settings of orchestrators.
        pre_stop_s: of each service, seconds that a pod which is to go waits before it drains.
        scrape_s: seconds between two looks of Prometheus at a pod's metrics.
        average_s: seconds over which the metrics adapter takes the average of these.
    """

    scalers: Mapping[str, Scaler]
    target: TargetSettings
    draft: DraftSettings
    orchestrator: OrchestratorSettings
    pre_stop_s: Mapping[str, float]
    scrape_s: float
    average_s: float


def deployed(folder: str = "") -> Deployed:
    """Reads `k8s/base`, and how the component `monitoring` has metrics collected.

    Args:
        folder: the folder `k8s`; empty takes that of the checkout this code is in.

    Raises:
        InvalidArgument: it is not there, or says what cannot be simulated.
    """
    root = Path(folder) if folder else Path(__file__).parents[1] / "k8s"
    if not (root / "base").is_dir():
        raise InvalidArgument(
            f"{root} has no base: this needs the repository's folder k8s; name it where Outrider is installed alone",
            "manifests",
        )
    found = {name: _objects(root / "base" / f"{name}.yaml") for name in SERVICES}
    environment = {name: _settings(root / "base" / "config" / f"{name}.env") for name in SERVICES}
    (pod_monitor,) = yaml.safe_load_all((root / "components" / "monitoring" / "pod-monitor.yaml").read_text())
    (endpoint,) = pod_monitor["spec"]["podMetricsEndpoints"]
    (rule,) = yaml.safe_load((root / "components" / "monitoring" / "adapter-rules.yaml").read_text())
    average = _AVERAGE.fullmatch(rule["metricsQuery"])
    if average is None:
        raise InvalidArgument(f"the metrics adapter asks {rule['metricsQuery']!r}, no average over a time", "manifests")
    return Deployed(
        scalers={name: Scaler.of(found[name]["HorizontalPodAutoscaler"]) for name in SERVICES},
        target=TargetSettings.model_validate(environment[TARGET]),
        draft=DraftSettings.model_validate(environment[DRAFT]),
        orchestrator=OrchestratorSettings.model_validate(environment[ORCHESTRATOR]),
        pre_stop_s={name: _pre_stop_s(found[name]["Deployment"]) for name in SERVICES},
        scrape_s=_duration_s(endpoint["interval"]),
        average_s=_duration_s(average[1]),
    )


def _objects(path: Path) -> dict[str, Any]:
    return {item["kind"]: item for item in yaml.safe_load_all(path.read_text()) if item}


def _settings(path: Path) -> dict[str, str]:
    """Returns what a ConfigMap's env file says, by the settings' own names."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pairs = (line.split("=", 1) for line in lines)
    return {name.removeprefix(PREFIX).lower(): value for name, value in pairs}


def _pre_stop_s(deployment: Mapping[str, Any]) -> float:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return float(container["lifecycle"]["preStop"]["sleep"]["seconds"])


def _duration_s(text: str) -> float:
    """Returns the seconds of one of Prometheus's durations, such as `15s` or `1m`."""
    if not text[:-1].isdecimal() or text[-1] not in _SECONDS:
        raise InvalidArgument(f"{text!r} is no duration in seconds or minutes", "manifests")
    return float(text[:-1]) * _SECONDS[text[-1]]
