"""Checks of the objects that others name: each exists, with the keys that are read."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from outrider.discovery.cluster import ApiError
from outrider.doctor.cluster_reader import Check, ClusterReader, all_of, run
from outrider.doctor.finding import Finding, State, listed
from outrider.doctor.overlay import PULL_KEY, Overlay, Reference

_PLACES: Final[Mapping[str, tuple[str, str]]] = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "PriorityClass": ("/apis/scheduling.k8s.io/v1", "priorityclasses"),
    "RuntimeClass": ("/apis/node.k8s.io/v1", "runtimeclasses"),
    "IngressClass": ("/apis/networking.k8s.io/v1", "ingressclasses"),
    "Gateway": ("/apis/gateway.networking.k8s.io/v1", "gateways"),
    "GatewayClass": ("/apis/gateway.networking.k8s.io/v1", "gatewayclasses"),
    "Issuer": ("/apis/cert-manager.io/v1", "issuers"),
    "ClusterIssuer": ("/apis/cert-manager.io/v1", "clusterissuers"),
}
"""Where objects are that others name."""


async def check_references(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    """Check that what objects name exists, with the keys that they read."""
    by_kind = defaultdict(list)
    for reference in overlay.references():
        by_kind[reference.kind].append(reference)
    found = await all_of(*(run(kind, _checking(reader, kind, by_kind[kind])) for kind in sorted(by_kind)))
    return [finding for findings in found for finding in findings]


def _checking(reader: ClusterReader, kind: str, references: list[Reference]) -> Check:
    async def check() -> list[Finding]:
        if kind not in _PLACES:
            return [Finding(kind, State.ADVICE, f"cannot be checked: {listed(item.name for item in references)}")]
        try:
            problems = await all_of(*(_problem(reader, reference) for reference in references))
        except ApiError as error:
            needed = listed(_described(item) for item in references if not item.is_optional) or "none"
            raise ApiError(error.status, f"{error.reason}; required: {needed}") from None
        pairs = list(zip(references, problems, strict=True))
        missing = {(item.namespace, item.name) for item, problem in pairs if problem and not item.is_optional}
        bad = [
            Finding(kind, State.ADVICE if item.is_optional else State.FAILS, problem, _remedy(item))
            for item, problem in pairs
            # What is missing and required by one is not worth a second line for those that do without it.
            if problem and not (item.is_optional and (item.namespace, item.name) in missing)
        ]
        good = [item for item, problem in pairs if not problem]
        there = [Finding(kind, State.HOLDS, f"there: {listed(map(_described, good))}")] if good else []
        return there + bad

    return check


async def _problem(reader: ClusterReader, reference: Reference) -> str:
    """Return what is wrong with an object that another one names; empty for nothing."""
    base, plural = _PLACES[reference.kind]
    place = f"/namespaces/{quote(reference.namespace)}" if reference.namespace else ""
    item = await reader.find(f"{base}{place}/{plural}/{quote(reference.name)}")
    users = f"for {reference.user}" + (", which does without it" if reference.is_optional else "")
    if item is None:
        return f"{_described(reference)} is missing {users}"
    keys = {*(item.get("data") or {}), *(item.get("binaryData") or {})}
    if absent := reference.keys - keys:
        return f"{reference.name} lacks {listed(absent)} {users}"
    return ""


def _described(reference: Reference) -> str:
    return reference.name + (f" ({listed(reference.keys)})" if reference.keys else "")


def _remedy(reference: Reference) -> str:
    where = f"kubectl -n {reference.namespace} " if reference.namespace else "kubectl "
    if reference.kind == "Secret" and reference.keys == {PULL_KEY}:
        options = "--docker-server=... --docker-username=... --docker-password=..."
        return f"{where}create secret docker-registry {reference.name} {options}"
    if reference.kind == "Secret":
        keys = "".join(f" --from-literal={key}=..." for key in sorted(reference.keys))
        return f"{where}create secret generic {reference.name}{keys}"
    return f"make it, or name another one; {where}get {_PLACES[reference.kind][1]} lists those that exist"
