"""Manifests as `kubectl kustomize` renders them, and what is asked of them in many places.

`python -m tests.k8s.rendering` prints the base with all components, for checkov.
"""

import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in (K8S / "components").glob("*/kustomization.yaml"))
ALTERNATIVES = ("models", "models-on-nodes")
"""Components of which an overlay has one."""
SERVICES = ("draft", "orchestrator", "target")
COMPONENT = "app.kubernetes.io/component"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is ten times as fast; not every build of PyYAML has it."""

Manifest = dict[str, Any]


def kustomize(folder: Path) -> list[Manifest]:
    """Returns the objects of a kustomization."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise AssertionError(done.stderr)
    assert not done.stderr, done.stderr
    return [item for item in yaml.load_all(done.stdout, LOADER) if item]


@functools.cache
def overlay(name: str) -> list[Manifest]:
    """Returns the objects of an overlay; whoever gets them changes nothing."""
    return kustomize(K8S / "overlays" / name)


def with_components(folder: Path, *components: str) -> list[Manifest]:
    """Returns the base with some components, in a namespace, by way of a kustomization in a folder below `k8s`."""
    target = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "outrider",
        "resources": ["../base"],
        "components": [f"../components/{name}" for name in components],
        "images": [{"name": f"outrider/{name}", "newTag": "0.1.0"} for name in (*SERVICES, "target-vllm")],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(target))
    return kustomize(folder)


@functools.cache
def all_together(alternative: str) -> list[Manifest]:
    """Returns the base with all components, of the alternatives one; whoever gets it changes nothing."""
    folder = Path(tempfile.mkdtemp(dir=K8S, prefix=".test-"))
    try:
        return with_components(
            folder, *(name for name in COMPONENTS if name == alternative or name not in ALTERNATIVES)
        )
    finally:
        shutil.rmtree(folder)


def production(
    folder: Path,
    *components: str,
    without: Sequence[str] = (),
    namespace: str = "outrider",
    cluster: Mapping[str, str] | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> list[Manifest]:
    """Returns the production overlay as whoever deploys changes it, by way of a copy in a folder below `k8s`.

    Args:
        folder: where the copy goes.
        components: added before the one that must come last.
        without: components that are taken out.
        namespace: where it is deployed.
        cluster: values of its cluster.env.
        change: changes the content of its kustomization.yaml.
    """
    place = folder / "production"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(K8S / "overlays" / "production", place)
    chosen = yaml.safe_load((place / "kustomization.yaml").read_text())
    chosen["namespace"] = namespace
    listed = [path for path in chosen["components"] if path.rpartition("/")[2] not in without]
    chosen["components"] = [*listed[:-1], *(f"../../components/{name}" for name in components), listed[-1]]
    if change is not None:
        change(chosen)
    (place / "kustomization.yaml").write_text(yaml.safe_dump(chosen))
    file = place / "cluster" / "cluster.env"
    given = values(file) | (cluster or {})
    file.write_text("".join(f"{key}={value}\n" for key, value in given.items()))
    return kustomize(place)


def values(path: Path) -> dict[str, str]:
    """Returns the names and values of an env file."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def of(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Returns the objects of a kind, by name."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def workloads(objects: list[Manifest]) -> dict[str, Manifest]:
    """Returns what keeps pods running, by name."""
    return of(objects, "Deployment") | of(objects, "StatefulSet") | of(objects, "DaemonSet")


def pod_makers(objects: list[Manifest]) -> dict[str, Manifest]:
    """Returns what makes pods, by name."""
    return workloads(objects) | of(objects, "Job")


def pod(workload: Manifest) -> Manifest:
    """Returns the pods' specification."""
    return workload["spec"]["template"]["spec"]


def container(workload: Manifest) -> Manifest:
    """Returns the only container."""
    (found,) = pod(workload)["containers"]
    return found


def containers(workload: Manifest) -> list[Manifest]:
    """Returns all containers, those that run before the only one included."""
    return [*pod(workload).get("initContainers", ()), container(workload)]


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


if __name__ == "__main__":
    print(yaml.safe_dump_all(item for name in ALTERNATIVES for item in all_together(name)))
