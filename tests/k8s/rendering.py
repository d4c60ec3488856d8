"""Manifests as `kubectl kustomize` renders them, and what is asked of them in many places."""

import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in (K8S / "components").glob("*/kustomization.yaml"))
SERVICES = ("draft", "orchestrator", "target")
COMPONENT = "app.kubernetes.io/component"

Manifest = dict[str, Any]


def kustomize(folder: Path) -> list[Manifest]:
    """Returns the objects of a kustomization."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise AssertionError(done.stderr)
    assert not done.stderr, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@functools.cache
def overlay(name: str) -> list[Manifest]:
    """Returns the objects of an overlay; whoever gets them changes nothing."""
    return kustomize(K8S / "overlays" / name)


def with_components(folder: Path, *components: str) -> list[Manifest]:
    """Returns the base with some components, by way of a kustomization in a folder below `k8s`."""
    target = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../base"],
        "components": [f"../components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(target))
    return kustomize(folder)


def of(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Returns the objects of a kind, by name."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def workloads(objects: list[Manifest]) -> dict[str, Manifest]:
    """Returns what makes pods, by name."""
    return of(objects, "Deployment") | of(objects, "StatefulSet")


def pod(workload: Manifest) -> Manifest:
    """Returns the pods' specification."""
    return workload["spec"]["template"]["spec"]


def container(workload: Manifest) -> Manifest:
    """Returns the only container."""
    (found,) = pod(workload)["containers"]
    return found


def labels(workload: Manifest) -> Mapping[str, str]:
    """Returns the labels of the pods."""
    return workload["spec"]["template"]["metadata"]["labels"]


def matches(selector: Mapping[str, Any], found: Mapping[str, str]) -> bool:
    """Returns whether a label selector takes an object with these labels."""
    if any(found.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for rule in selector.get("matchExpressions") or ():
        assert rule["operator"] == "In", rule
        if found.get(rule["key"]) not in rule["values"]:
            return False
    return True


def environment(objects: list[Manifest], workload: Manifest) -> dict[str, str]:
    """Returns the plain environment of a container: of its ConfigMaps, then its own; without values from elsewhere."""
    maps, found = of(objects, "ConfigMap"), {}
    for source in container(workload).get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]["data"]
    return found | {item["name"]: item["value"] for item in container(workload).get("env", ()) if "value" in item}


def strings(item: object) -> Iterator[str]:
    """Yields all strings within an object."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from strings(value)
    elif isinstance(item, list):
        for value in item:
            yield from strings(value)
