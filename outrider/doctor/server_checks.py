"""Checks of what the API server has and lets the caller do: its version, kinds, permissions, and namespaces."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from outrider.discovery.cluster import ApiError
from outrider.doctor.cluster_reader import FORBIDDEN, ClusterReader, all_of, labels_of
from outrider.doctor.finding import Finding, State, listed
from outrider.doctor.overlay import Manifest, Overlay
from outrider.doctor.pod_security import violations

_VERBS: Final = ("get", "create", "patch")
"""What `kubectl apply` does to each object."""

_OPERATORS: Final[Mapping[str, str]] = {
    "cert-manager.io": "install cert-manager",
    "gateway.networking.k8s.io": "install the Gateway API's CRDs, and an implementation of it",
    "inference.networking.k8s.io": "install the CRDs of the Gateway API inference extension",
    "keda.sh": "install KEDA",
    "leaderworkerset.x-k8s.io": "install LeaderWorkerSet",
    "monitoring.coreos.com": "install the Prometheus operator, or its CRDs",
}
"""What serves the groups that Kubernetes itself does not."""


async def check_version(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that the server is new enough for what the pods use."""
    needed, why = _needed_version(overlay)
    numbers = re.match(r"(\d+)\+?/(\d+)", f"{reader.version.get('major')}/{reader.version.get('minor')}")
    if numbers is None:
        return [Finding("version", State.UNKNOWN, "cannot be checked: /version has no major and minor number")]
    found = int(numbers[1]), int(numbers[2])
    text = f"{found[0]}.{found[1]}"
    if found < (1, needed):
        remedy = f"upgrade to 1.{needed} or newer"
        return [Finding("version", State.FAILS, f"{text} is too old for {why}", remedy)]
    enough = f"; {why} requires 1.{needed}" if needed else ""
    return [Finding("version", State.HOLDS, text + enough)]


async def check_kinds(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that the server has every kind of the overlay, those of operators included."""
    kinds = sorted({(item["apiVersion"], item["kind"]) for item in overlay.objects})
    resources = await all_of(*(reader.resources_of(api_version) for api_version, _ in kinds))
    missing = defaultdict(list)
    for (api_version, kind), served in zip(kinds, resources, strict=True):
        if kind not in served:
            missing[api_version].append(kind)
    if not missing:
        return [Finding("kinds", State.HOLDS, f"all {len(kinds)} are served")]
    return [
        Finding("kinds", State.FAILS, f"{listed(names)} of {api_version}: not served", _served_by(api_version))
        for api_version, names in sorted(missing.items())
    ]


async def check_permissions(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that the caller may apply each kind, by a SelfSubjectAccessReview for each verb."""
    asked: dict[tuple[str, str, str, str], str] = {}
    for item in overlay.objects:
        resource = (await reader.resources_of(item["apiVersion"])).get(item["kind"])
        if resource is None:
            continue
        group = item["apiVersion"].rpartition("/")[0]
        namespace = overlay.namespace_of(item) if resource.get("namespaced") else ""
        for verb in _VERBS:
            is_there = item["kind"] == "Namespace" and verb == "create" and await _has_namespace(reader, item)
            if not is_there:
                name = resource["name"] + (f".{group}" if group else "")
                asked[(verb, group, resource["name"], namespace)] = name
    allowed = await all_of(*(_may(reader, *question) for question in asked))
    denied: dict[str, list[str]] = defaultdict(list)
    for (verb, _, _, _), name, is_allowed in zip(asked, asked.values(), allowed, strict=True):
        if not is_allowed and verb not in denied[name]:
            denied[name].append(verb)
    by_verbs: dict[str, list[str]] = defaultdict(list)
    for name, verbs in denied.items():
        by_verbs[", ".join(verbs)].append(name)
    if not by_verbs:
        return [
            Finding("permissions", State.HOLDS, f"may {', '.join(_VERBS)} each of {len(set(asked.values()))} kinds")
        ]
    remedy = "have a role bound that allows it, or have somebody else apply the overlay"
    return [
        Finding("permissions", State.FAILS, f"may not {verbs} {listed(names)}", remedy)
        for verbs, names in by_verbs.items()
    ]


async def check_namespaces(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that each namespace exists or is made, and that its Pod Security level admits the pods."""
    found = []
    own = {item["metadata"]["name"]: item for item in overlay.of("Namespace")}
    for name in overlay.namespaces:
        existing = await reader.find(f"/api/v1/namespaces/{quote(name)}")
        if existing is None and name not in own:
            found.append(Finding("namespace", State.FAILS, f"{name} is missing", f"kubectl create namespace {name}"))
            continue
        labels = {**labels_of(existing or {}), **labels_of(own.get(name, {}))}
        level = labels.get("pod-security.kubernetes.io/enforce", "privileged")
        refused = [
            f"{template.owner} ({listed(problems)})"
            for template in overlay.pod_templates()
            if template.namespace == name and (problems := violations(template.spec, level))
        ]
        if refused:
            remedy = "change the pods, or the namespace's label pod-security.kubernetes.io/enforce"
            found.append(Finding("namespace", State.FAILS, f"{name} is {level}: refuses {listed(refused)}", remedy))
            continue
        state = "exists" if existing else "is made by the overlay"
        found.append(Finding("namespace", State.HOLDS, f"{name} {state}; Pod Security level {level} admits its pods"))
    return found


async def _has_namespace(reader: ClusterReader, item: Manifest) -> bool:
    """Return whether a namespace exists; one that may not be read counts as missing."""
    try:
        return await reader.find(f"/api/v1/namespaces/{quote(item['metadata']['name'])}") is not None
    except ApiError as error:
        if error.status in FORBIDDEN:
            return False
        raise


async def _may(reader: ClusterReader, verb: str, group: str, resource: str, namespace: str) -> bool:
    attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = await reader.post(path, review)
    return (answer.get("status") or {}).get("allowed") is True


def _needed_version(overlay: Overlay) -> tuple[int, str]:
    """Return the minor version of Kubernetes 1 that the pods require, and for what; 0 for any."""
    needed = [(0, "")]
    for template in overlay.pod_templates():
        for container in template.spec.get("initContainers") or ():
            if container.get("restartPolicy") == "Always":
                needed.append((29, f"a sidecar container ({template.owner})"))
        for container in template.containers:
            if "sleep" in ((container.get("lifecycle") or {}).get("preStop") or {}):
                needed.append((30, f"a preStop hook that sleeps ({template.owner})"))
            if any("grpc" in (container.get(f"{name}Probe") or {}) for name in ("startup", "readiness", "liveness")):
                needed.append((24, f"gRPC probes ({template.owner})"))
    return max(needed, key=lambda pair: pair[0])


def _served_by(api_version: str) -> str:
    group = api_version.rpartition("/")[0]
    if group in _OPERATORS:
        return _OPERATORS[group]
    is_own = not group or "." not in group or group.endswith(".k8s.io")
    return "upgrade the cluster, or take another version" if is_own else f"install what serves {group}"
