"""`outrider doctor --kubernetes` on a cluster that has what it looks for, and on one that lacks it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conversion import convert
from tests.cluster.deployed import Deployed
from tests.k8s.rendering import K8S, Manifest, kustomize

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def doctor(deployed: Deployed, objects: list[Manifest], file: Path) -> list[dict[str, Any]]:
    """Returns the findings about an overlay."""
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    environment = os.environ | {"KUBECONFIG": str(deployed.node.kubeconfig)}
    command = [sys.executable, "-m", "outrider", "doctor", "--kubernetes", "--overlay", str(file), "--json"]
    answer = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=200).stdout)
    assert answer["ok"] == all(item["state"] in ("ok", "warn") for item in answer["findings"])
    findings: list[dict[str, Any]] = answer["findings"]
    return findings


def failed(findings: list[dict[str, Any]]) -> dict[str, str]:
    return {item["check"]: item["found"] for item in findings if item["state"] not in ("ok", "warn")}


def test_what_runs_has_all_that_it_requires(
    markov: Deployed, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    objects = convert(kustomize(K8S / "overlays" / "local"), {}).objects
    findings = doctor(markov, objects, tmp_path / "overlay.json")
    record_property("num_findings", len(findings))
    assert failed(findings) == {}
    # The node has no metrics API, which the tests of scaling bring, and volumes without a StorageClass.
    assert {item["check"] for item in findings if item["state"] == "warn"} >= {"autoscaling", "storage"}
    assert {item["check"] for item in findings} >= {"version", "kinds", "permissions", "namespace", "nodes", "storage"}


def test_what_is_missing_is_named(markov: Deployed, tmp_path: Path) -> None:
    """The overlay for production, unchanged, on this old and empty cluster."""
    found = failed(doctor(markov, kustomize(K8S / "overlays" / "production"), tmp_path / "overlay.json"))
    assert "1.20 is too old" in found["version"]
    assert "not served" in found["kinds"]
    assert "is missing" in found["Secret"]
