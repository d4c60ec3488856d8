"""Converts manifests for Kubernetes 1.20, the version of the cluster's server.

What the manifests have that is newer is put as that version has it. What it has no form of is left out, and named.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from tests.k8s.rendering import Manifest, pod, workloads

_OLDER: Final = {
    ("HorizontalPodAutoscaler", "autoscaling/v2"): "autoscaling/v2beta2",
    ("PodDisruptionBudget", "policy/v1"): "policy/v1beta1",
}
_PROBES: Final = {"startupProbe": 1, "readinessProbe": 2, "livenessProbe": 3}
"""How many times the period of each is taken where it starts an interpreter: as often as by gRPC they take a core."""
_EXEC_TIMEOUT_S: Final = 10
"""A probe that starts a process takes seconds where all pods share two cores."""
_STARTS: Final = 360
"""Attempts of a startup probe: the manifests' limits are for pods with cores of their own."""
_POD_SECURITY: Final = "pod-security.kubernetes.io/"
VOLUMES: Final = PurePosixPath("/var/lib/volumes")


@dataclass(slots=True)
class Converted:
    """Manifests as the older version takes them.

    Attributes:
        objects: in the order of the manifests, volumes first.
        changes: a line for each kind of change.
        not_taken: a line for each thing that the version accepts and does nothing about, or does not know.
        folders: of the node, which the volumes need; their owner is the user of the pods.
    """

    objects: list[Manifest]
    changes: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)
    folders: list[PurePosixPath] = field(default_factory=list)


def convert(objects: Sequence[Manifest], images: Mapping[str, str]) -> Converted:
    """Returns manifests for Kubernetes 1.20 on a node that can pull nothing.

    Args:
        objects: as kustomize renders them; they stay as they are.
        images: what the node has in place of an image.

    Raises:
        ValueError: an object is of a group that only an operator brings.
    """
    made = Converted([copy.deepcopy(item) for item in objects])
    notes: dict[str, None] = {}
    for item in made.objects:
        group = item["apiVersion"].rpartition("/")[0]
        if "." in group and not group.endswith(".k8s.io"):
            raise ValueError(f"{item['kind']} {item['metadata']['name']}: no server has {item['apiVersion']} by itself")
        if older := _OLDER.get((item["kind"], item["apiVersion"])):
            notes[f"{item['kind']}: {item['apiVersion']} to {older}"] = None
            item["apiVersion"] = older
        made.not_taken += _ignored(item)
    for name, workload in workloads(made.objects).items():
        for container in pod(workload)["containers"]:
            notes |= dict.fromkeys(_convert_container(name, container, images))
    made.objects[:0] = _volumes(made)
    made.changes = list(notes)
    return made


def _ignored(item: Manifest) -> Iterator[str]:
    if item["kind"] == "NetworkPolicy":
        yield f"NetworkPolicy {item['metadata']['name']}: the bridge plug-in enforces none"
    if item["kind"] == "Namespace":
        for label in item["metadata"].get("labels", {}):
            if label.startswith(_POD_SECURITY):
                yield f"Namespace {item['metadata']['name']}: {label}, Pod Security admission came with 1.22"


def _convert_container(name: str, container: dict[str, Any], images: Mapping[str, str]) -> Iterator[str]:
    for kind, times in _PROBES.items():
        probe = container.get(kind, {})
        if grpc := probe.pop("grpc", None):
            probe["exec"] = {"command": ["python", "-m", "outrider.serving", grpc.get("service", "")]}
            probe["periodSeconds"] = times * probe.get("periodSeconds", 10)
            yield f"gRPC {kind}: exec of python -m outrider.serving, {times} times the period"
            if kind == "startupProbe":
                probe["failureThreshold"] = max(_STARTS, probe["failureThreshold"])
                yield f"startup probes: {_STARTS} attempts or more"
        if "exec" in probe:
            probe["timeoutSeconds"] = max(_EXEC_TIMEOUT_S, probe.get("timeoutSeconds", 1))
    for hook in container.get("lifecycle", {}).values():
        if sleep := hook.pop("sleep", None):
            hook["exec"] = {"command": ["sleep", str(sleep["seconds"])]}
            yield "lifecycle sleep: exec of sleep"
    container["imagePullPolicy"] = "Never"
    yield "imagePullPolicy: Never"
    if there := images.get(container["image"]):
        yield f"{name}: image {container['image']} to {there}"
        container["image"] = there


def _volumes(made: Converted) -> Iterator[Manifest]:
    """Yields a PersistentVolume for each claim that a StatefulSet makes; nothing else makes any here."""
    for item in made.objects:
        for claim in item["spec"].get("volumeClaimTemplates", ()) if item["kind"] == "StatefulSet" else ():
            metadata = item["metadata"]
            of_pod = f"{claim['metadata']['name']}-{metadata['name']}-0"
            folder = VOLUMES / metadata["namespace"] / of_pod
            made.folders.append(folder)
            yield {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"{metadata['namespace']}-{of_pod}"},
                "spec": {
                    "accessModes": claim["spec"]["accessModes"],
                    "capacity": claim["spec"]["resources"]["requests"],
                    "claimRef": {"namespace": metadata["namespace"], "name": of_pod},
                    "hostPath": {"path": str(folder), "type": "Directory"},
                    "persistentVolumeReclaimPolicy": "Retain",
                },
            }
