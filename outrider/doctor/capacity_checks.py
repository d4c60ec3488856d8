"""Checks of what pods are given: nodes that take them, storage, metrics to scale by, and the network's rules."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from outrider.discovery.cluster import ApiError
from outrider.doctor.cluster_reader import ClusterReader, labels_of
from outrider.doctor.finding import Finding, State, listed
from outrider.doctor.node_fit import check_nodes
from outrider.doctor.overlay import Manifest, Overlay, label

_METRICS_APIS: Final[Mapping[str, tuple[str, str]]] = {
    "Resource": ("metrics.k8s.io", "install metrics-server"),
    "ContainerResource": ("metrics.k8s.io", "install metrics-server"),
    "Pods": ("custom.metrics.k8s.io", "install an adapter, such as prometheus-adapter, or scale by KEDA"),
    "Object": ("custom.metrics.k8s.io", "install an adapter, such as prometheus-adapter, or scale by KEDA"),
    "External": ("external.metrics.k8s.io", "install an adapter, or scale by KEDA"),
}
"""Which API an autoscaler reads each type of metric from."""


async def check_room(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that some node takes each pod: ready, with its labels, tolerated taints, and room for its requests."""
    templates = overlay.pod_templates()
    if not templates:
        return []
    nodes = await reader.list("/api/v1/nodes")
    return [check_nodes(template, nodes) for template in templates]


async def check_storage(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that there is a StorageClass for each claim."""
    claims = overlay.claims()
    if not claims:
        return []
    classes = await reader.list("/apis/storage.k8s.io/v1/storageclasses")
    names = {item["metadata"]["name"] for item in classes} | {
        item["metadata"]["name"] for item in overlay.of("StorageClass")
    }
    mark = "storageclass.kubernetes.io/is-default-class"
    is_default = any((item["metadata"].get("annotations") or {}).get(mark) == "true" for item in classes)
    has_volumes = not is_default and await _has_volumes_without_class(reader, overlay)
    found, good = [], []
    for user, claim in claims:
        name = claim.get("storageClassName")
        if name == "" or claim.get("volumeName") or (name is None and has_volumes):
            text = f"{user} takes a PersistentVolume without a StorageClass: whether one fits cannot be seen"
            found.append(Finding("storage", State.ADVICE, text, "kubectl get persistentvolumes"))
        elif name is None and not is_default:
            remedy = f"make one the default, or name one in the overlay; there are: {listed(names) or 'none'}"
            found.append(Finding("storage", State.FAILS, f"{user} needs a default StorageClass: there is none", remedy))
        elif name is not None and name not in names:
            remedy = f"make it, or name another one; there are: {listed(names) or 'none'}"
            found.append(
                Finding("storage", State.FAILS, f"{user} needs the StorageClass {name}: it is missing", remedy)
            )
        else:
            good.append(f"{user} ({name or 'the default'})")
    return [*([Finding("storage", State.HOLDS, f"StorageClass for {listed(good)}")] if good else []), *found]


async def _has_volumes_without_class(reader: ClusterReader, overlay: Overlay) -> bool:
    """Return whether claims that name no class could get a volume where no class is the default."""
    volumes = overlay.of("PersistentVolume")
    # Whoever may not list volumes sees those of the overlay.
    with contextlib.suppress(ApiError):
        volumes = [*volumes, *await reader.list("/api/v1/persistentvolumes")]
    return any(not (item.get("spec") or {}).get("storageClassName") for item in volumes)


async def check_autoscaling(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that the APIs are served from which the autoscalers read their metrics."""
    users: dict[tuple[str, str], set[str]] = defaultdict(set)
    names: dict[tuple[str, str], set[str]] = defaultdict(set)
    scaling = set()
    for item in overlay.of("HorizontalPodAutoscaler"):
        spec = item["spec"]
        metrics: list[Manifest] = spec.get("metrics") or [{"type": "Resource"}]
        for metric in metrics:
            source = _METRICS_APIS[metric["type"]]
            users[source].add(label(item))
            if pods := metric.get("pods"):
                names[source].add(f"pods/{pods['metric']['name']}")
            if spec["maxReplicas"] > (spec.get("minReplicas") or 1):
                scaling.add(source)
    found = []
    for source, who in sorted(users.items()):
        group, remedy = source
        served = await reader.find(f"/apis/{group}")
        if served is None:
            # An autoscaler whose bounds are one number keeps that number without any metric.
            state = State.FAILS if source in scaling else State.ADVICE
            still = "" if source in scaling else ", whose bounds leave nothing to scale"
            found.append(Finding("autoscaling", state, f"{group} is not served, for {listed(who)}{still}", remedy))
            continue
        version = (served.get("preferredVersion") or {}).get("groupVersion") or f"{group}/v1beta1"
        answer = await reader.find(f"/apis/{version}") or {}
        known = {item["name"] for item in answer.get("resources") or ()}
        if absent := names[source] - known:
            text = f"{group} does not list {listed(name.removeprefix('pods/') for name in absent)} yet"
            remedy = "it does once pods are scraped, where the adapter has rules for them (component monitoring)"
            found.append(Finding("autoscaling", State.ADVICE, text, remedy))
        else:
            found.append(Finding("autoscaling", State.HOLDS, f"{group} is served, for {listed(who)}"))
    return found


async def check_network_policies(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that the namespaces that policies select have their labels."""
    policies = overlay.of("NetworkPolicy")
    if not policies:
        return []
    text = f"{len(policies)} policies: whether the network plug-in enforces them cannot be seen from the API"
    remedy = "try a connection that they forbid"
    found = [Finding("network policies", State.ADVICE, text, remedy)]
    try:
        namespaces = await reader.list("/api/v1/namespaces")
    except ApiError as error:
        text = f"whether namespaces have the labels that they select cannot be checked: {error}"
        return [*found, Finding("network policies", State.ADVICE, text)]
    made = [labels_of(item) for item in (*namespaces, *overlay.of("Namespace"))]
    wanted: dict[str, set[str]] = defaultdict(set)
    for policy in policies:
        for selector in _namespace_selectors(policy["spec"]):
            if selector and not any(selector.items() <= labels.items() for labels in made):
                pairs = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
                wanted[pairs].add(policy["metadata"]["name"])
    for pairs, names in sorted(wanted.items()):
        text = f"no namespace is labelled {pairs}, so that {listed(names)} lets nobody through"
        found.append(Finding("network policies", State.ADVICE, text, f"kubectl label namespace NAMESPACE {pairs}"))
    return found


def _namespace_selectors(spec: Manifest) -> Iterable[Mapping[str, str]]:
    """Yield the labels by which a policy selects namespaces."""
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(direction) or ():
            for peer in rule.get(peers) or ():
                yield (peer.get("namespaceSelector") or {}).get("matchLabels") or {}
