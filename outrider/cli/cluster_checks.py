"""The prerequisites of a deployment, checked against a cluster's API server.

What is required follows from the objects of the overlay, whoever made it: no check has a list of what Outrider's own
overlays contain. Nothing is changed in the cluster, and values of Secrets are not part of any finding.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, TypeVar, cast
from urllib.parse import quote

from outrider.cli.finding import Finding, State, listed
from outrider.cli.node_fit import check_nodes
from outrider.cli.overlay import Manifest, Overlay, Reference, label
from outrider.cli.pod_security import violations
from outrider.discovery.cluster import ApiError, Cluster
from outrider.errors import InvalidArgument

_T = TypeVar("_T")

CALL_S: Final = 10.0
"""Bound on each call."""
_MAX_CALLS: Final = 8
_PAGE: Final = 500
_FORBIDDEN: Final = (401, 403)
_NOT_FOUND: Final = 404

_VERBS: Final = ("get", "create", "patch")
"""What `kubectl apply` does to each object."""

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

_OPERATORS: Final[Mapping[str, str]] = {
    "cert-manager.io": "install cert-manager",
    "gateway.networking.k8s.io": "install the Gateway API's CRDs, and an implementation of it",
    "inference.networking.k8s.io": "install the CRDs of the Gateway API inference extension",
    "keda.sh": "install KEDA",
    "leaderworkerset.x-k8s.io": "install LeaderWorkerSet",
    "monitoring.coreos.com": "install the Prometheus operator, or its CRDs",
}
"""What serves the groups that Kubernetes itself does not."""

_METRICS_APIS: Final[Mapping[str, tuple[str, str]]] = {
    "Resource": ("metrics.k8s.io", "install metrics-server"),
    "ContainerResource": ("metrics.k8s.io", "install metrics-server"),
    "Pods": ("custom.metrics.k8s.io", "install an adapter, such as prometheus-adapter, or scale by KEDA"),
    "Object": ("custom.metrics.k8s.io", "install an adapter, such as prometheus-adapter, or scale by KEDA"),
    "External": ("external.metrics.k8s.io", "install an adapter, or scale by KEDA"),
}
"""Which API an autoscaler reads each type of metric from."""

_EXAMPLE_HOST: Final = re.compile(r"(?<![\w.-])(?:[\w-]+\.)*(?:example\.(?:com|net|org)|[\w-]+\.example)(?![\w.-]*\w)")
"""Names that RFC 2606 reserves for documentation, so that they stand for another one."""

Check: TypeAlias = Callable[[], Awaitable[list[Finding]]]


async def check_cluster(cluster: Cluster, overlay: Overlay | None) -> list[Finding]:
    """Return the findings about a cluster, in the order of the checks.

    Args:
        cluster: the cluster.
        overlay: what is to be deployed; None checks the server alone.

    Raises:
        InvalidArgument: there is no cluster to connect to, or an object of the overlay lacks what its kind requires.
    """
    try:
        version = await cluster.request("GET", "/version", timeout_s=CALL_S)
    except ApiError as error:
        remedy = "look at the server's address, the network between, and your credentials"
        return [Finding("API server", State.FAILS, f"not reachable: {error}", remedy)]
    found = [Finding("API server", State.HOLDS, f"reachable, {version.get('gitVersion', 'of an unknown version')}")]
    if overlay is None:
        remedy = "--overlay FOLDER checks what it needs"
        return [*found, Finding("overlay", State.ADVICE, "none is given: nothing else is checked", remedy)]
    try:
        return found + await _ClusterChecks(cluster, overlay, version).run()
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidArgument(f"an object is not valid: {type(error).__name__} {error}", "overlay") from error


class _ClusterChecks:
    """All checks of one overlay against one cluster.

    Args:
        cluster: the cluster.
        overlay: what is to be deployed.
        version: what /version answered.
    """

    def __init__(self, cluster: Cluster, overlay: Overlay, version: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self._overlay = overlay
        self._version = version
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._resources: dict[str, asyncio.Task[dict[str, Manifest]]] = {}

    async def run(self) -> list[Finding]:
        """Return all findings."""
        checks: tuple[tuple[str, Check], ...] = (
            ("version", self._check_version),
            ("kinds", self._check_kinds),
            ("permissions", self._check_permissions),
            ("namespace", self._check_namespaces),
            ("references", self._check_references),
            ("nodes", self._check_nodes),
            ("storage", self._check_storage),
            ("autoscaling", self._check_metrics),
            ("images", self._check_images),
            ("placeholders", self._check_placeholders),
            ("network policies", self._check_network_policies),
        )
        found = await _all(*(self._run(name, check) for name, check in checks))
        return [finding for findings in found for finding in findings]

    async def _run(self, name: str, check: Check) -> list[Finding]:
        try:
            return await check()
        except ApiError as error:
            remedy = "ask somebody who may read it" if error.status in _FORBIDDEN else ""
            return [Finding(name, State.UNKNOWN, f"cannot be checked: {error}", remedy)]

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._calls:
            return await self._cluster.request("GET", path, timeout_s=CALL_S)

    async def _find(self, path: str) -> dict[str, Any] | None:
        """Return an object; None where there is none."""
        try:
            return await self._get(path)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def _list(self, path: str) -> list[Manifest]:
        items: list[Manifest] = []
        token = ""
        while True:
            page = await self._get(f"{path}?limit={_PAGE}" + (f"&continue={quote(token)}" if token else ""))
            items += page.get("items") or ()
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return items

    async def _resources_of(self, api_version: str) -> dict[str, Manifest]:
        """Return the resources of an API version by kind; none where the server does not have it."""
        if api_version not in self._resources:
            self._resources[api_version] = asyncio.create_task(self._listed_resources(api_version))
        return await self._resources[api_version]

    async def _listed_resources(self, api_version: str) -> dict[str, Manifest]:
        path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        answer = await self._find(path)
        resources = (answer or {}).get("resources") or ()
        return {item["kind"]: item for item in resources if "/" not in item["name"]}

    async def _check_version(self) -> list[Finding]:
        needed, why = _needed_version(self._overlay)
        numbers = re.match(r"(\d+)\+?/(\d+)", f"{self._version.get('major')}/{self._version.get('minor')}")
        if numbers is None:
            return [Finding("version", State.UNKNOWN, "cannot be checked: /version has no major and minor number")]
        found = int(numbers[1]), int(numbers[2])
        text = f"{found[0]}.{found[1]}"
        if found < (1, needed):
            remedy = f"upgrade to 1.{needed} or newer"
            return [Finding("version", State.FAILS, f"{text} is too old for {why}", remedy)]
        enough = f"; {why} requires 1.{needed}" if needed else ""
        return [Finding("version", State.HOLDS, text + enough)]

    async def _check_kinds(self) -> list[Finding]:
        """Check that the server has every kind of the overlay, those of operators included."""
        kinds = sorted({(item["apiVersion"], item["kind"]) for item in self._overlay.objects})
        resources = await _all(*(self._resources_of(api_version) for api_version, _ in kinds))
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

    async def _check_permissions(self) -> list[Finding]:
        """Check that the caller may apply each kind, by a SelfSubjectAccessReview for each verb."""
        asked: dict[tuple[str, str, str, str], str] = {}
        for item in self._overlay.objects:
            resource = (await self._resources_of(item["apiVersion"])).get(item["kind"])
            if resource is None:
                continue
            group = item["apiVersion"].rpartition("/")[0]
            namespace = self._overlay.namespace_of(item) if resource.get("namespaced") else ""
            for verb in _VERBS:
                is_there = item["kind"] == "Namespace" and verb == "create" and await self._has_namespace(item)
                if not is_there:
                    name = resource["name"] + (f".{group}" if group else "")
                    asked[(verb, group, resource["name"], namespace)] = name
        allowed = await _all(*(self._may(*question) for question in asked))
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

    async def _has_namespace(self, item: Manifest) -> bool:
        """Return whether a namespace exists; one that may not be read counts as missing."""
        try:
            return await self._find(f"/api/v1/namespaces/{quote(item['metadata']['name'])}") is not None
        except ApiError as error:
            if error.status in _FORBIDDEN:
                return False
            raise

    async def _may(self, verb: str, group: str, resource: str, namespace: str) -> bool:
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        async with self._calls:
            answer = await self._cluster.request("POST", path, review, timeout_s=CALL_S)
        return (answer.get("status") or {}).get("allowed") is True

    async def _check_namespaces(self) -> list[Finding]:
        """Check that each namespace exists or is made, and that its Pod Security level admits the pods."""
        found = []
        own = {item["metadata"]["name"]: item for item in self._overlay.of("Namespace")}
        for name in self._overlay.namespaces:
            existing = await self._find(f"/api/v1/namespaces/{quote(name)}")
            if existing is None and name not in own:
                found.append(
                    Finding("namespace", State.FAILS, f"{name} is missing", f"kubectl create namespace {name}")
                )
                continue
            labels = {**_labels(existing or {}), **_labels(own.get(name, {}))}
            level = labels.get("pod-security.kubernetes.io/enforce", "privileged")
            refused = [
                f"{template.owner} ({listed(problems)})"
                for template in self._overlay.pod_templates()
                if template.namespace == name and (problems := violations(template.spec, level))
            ]
            if refused:
                remedy = "change the pods, or the namespace's label pod-security.kubernetes.io/enforce"
                found.append(Finding("namespace", State.FAILS, f"{name} is {level}: refuses {listed(refused)}", remedy))
                continue
            state = "exists" if existing else "is made by the overlay"
            found.append(
                Finding("namespace", State.HOLDS, f"{name} {state}; Pod Security level {level} admits its pods")
            )
        return found

    async def _check_references(self) -> list[Finding]:
        """Check that what objects name exists, with the keys that they read."""
        by_kind = defaultdict(list)
        for reference in self._overlay.references():
            by_kind[reference.kind].append(reference)
        found = await _all(*(self._run(kind, self._checking(kind, by_kind[kind])) for kind in sorted(by_kind)))
        return [finding for findings in found for finding in findings]

    def _checking(self, kind: str, references: list[Reference]) -> Check:
        async def check() -> list[Finding]:
            if kind not in _PLACES:
                return [Finding(kind, State.ADVICE, f"cannot be checked: {listed(item.name for item in references)}")]
            try:
                problems = await _all(*(self._problem(reference) for reference in references))
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

    async def _problem(self, reference: Reference) -> str:
        """Return what is wrong with an object that another one names; empty for nothing."""
        base, plural = _PLACES[reference.kind]
        place = f"/namespaces/{quote(reference.namespace)}" if reference.namespace else ""
        item = await self._find(f"{base}{place}/{plural}/{quote(reference.name)}")
        users = f"for {reference.user}" + (", which does without it" if reference.is_optional else "")
        if item is None:
            return f"{_described(reference)} is missing {users}"
        keys = {*(item.get("data") or {}), *(item.get("binaryData") or {})}
        if absent := reference.keys - keys:
            return f"{reference.name} lacks {listed(absent)} {users}"
        return ""

    async def _check_nodes(self) -> list[Finding]:
        """Check that some node takes each pod: ready, with its labels, tolerated taints, and room for its requests."""
        templates = self._overlay.pod_templates()
        if not templates:
            return []
        nodes = await self._list("/api/v1/nodes")
        return [check_nodes(template, nodes) for template in templates]

    async def _check_storage(self) -> list[Finding]:
        claims = self._overlay.claims()
        if not claims:
            return []
        classes = await self._list("/apis/storage.k8s.io/v1/storageclasses")
        names = {item["metadata"]["name"] for item in classes} | {
            item["metadata"]["name"] for item in self._overlay.of("StorageClass")
        }
        mark = "storageclass.kubernetes.io/is-default-class"
        is_default = any((item["metadata"].get("annotations") or {}).get(mark) == "true" for item in classes)
        found, good = [], []
        for user, claim in claims:
            name = claim.get("storageClassName")
            if name == "" or claim.get("volumeName"):
                text = f"{user} takes a PersistentVolume without a StorageClass: whether one fits cannot be seen"
                found.append(Finding("storage", State.ADVICE, text, "kubectl get persistentvolumes"))
            elif name is None and not is_default:
                remedy = f"make one the default, or name one in the overlay; there are: {listed(names) or 'none'}"
                found.append(
                    Finding("storage", State.FAILS, f"{user} needs a default StorageClass: there is none", remedy)
                )
            elif name is not None and name not in names:
                remedy = f"make it, or name another one; there are: {listed(names) or 'none'}"
                found.append(
                    Finding("storage", State.FAILS, f"{user} needs the StorageClass {name}: it is missing", remedy)
                )
            else:
                good.append(f"{user} ({name or 'the default'})")
        return [*([Finding("storage", State.HOLDS, f"StorageClass for {listed(good)}")] if good else []), *found]

    async def _check_metrics(self) -> list[Finding]:
        """Check that the APIs are served from which the autoscalers read their metrics."""
        users: dict[tuple[str, str], set[str]] = defaultdict(set)
        names: dict[tuple[str, str], set[str]] = defaultdict(set)
        scaling = set()
        for item in self._overlay.of("HorizontalPodAutoscaler"):
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
            served = await self._find(f"/apis/{group}")
            if served is None:
                # An autoscaler whose bounds are one number keeps that number without any metric.
                state = State.FAILS if source in scaling else State.ADVICE
                still = "" if source in scaling else ", whose bounds leave nothing to scale"
                found.append(Finding("autoscaling", state, f"{group} is not served, for {listed(who)}{still}", remedy))
                continue
            version = (served.get("preferredVersion") or {}).get("groupVersion") or f"{group}/v1beta1"
            answer = await self._find(f"/apis/{version}") or {}
            known = {item["name"] for item in answer.get("resources") or ()}
            if absent := names[source] - known:
                text = f"{group} does not list {listed(name.removeprefix('pods/') for name in absent)} yet"
                remedy = "it does once pods are scraped, where the adapter has rules for them (component monitoring)"
                found.append(Finding("autoscaling", State.ADVICE, text, remedy))
            else:
                found.append(Finding("autoscaling", State.HOLDS, f"{group} is served, for {listed(who)}"))
        return found

    async def _check_images(self) -> list[Finding]:
        images = defaultdict(set)
        pulled = set()
        for template in self._overlay.pod_templates():
            for container in template.containers:
                images[container["image"]].add(template.owner)
                if container.get("imagePullPolicy", "") not in ("Never", "IfNotPresent"):
                    pulled.add(container["image"])
        found = []
        for image, who in sorted(images.items()):
            users = listed(who)
            if _EXAMPLE_HOST.search(image):
                found.append(
                    Finding("images", State.FAILS, f"{image} of {users} is a placeholder", "name yours in `images`")
                )
            elif not _has_registry(image) and image not in pulled:
                text = f"{image} of {users} names no registry: it must lie on each node, or on Docker Hub"
                found.append(Finding("images", State.ADVICE, text, "load it on every node, or name a registry"))
            elif _floats(image):
                found.append(Finding("images", State.ADVICE, f"{image} of {users} has no fixed tag", "name a version"))
        if images and not found:
            found.append(
                Finding(
                    "images",
                    State.HOLDS,
                    f"{len(images)} named, with fixed tags; whether they can be pulled is not checked",
                )
            )
        return found

    async def _check_placeholders(self) -> list[Finding]:
        """Check that nothing but images has a name of a documentation's domain: those are checked for themselves."""
        found = []
        for item in self._overlay.objects:
            if item["kind"] == "CustomResourceDefinition":
                continue
            for path, text in _strings(item):
                # A whole file in a ConfigMap may have examples in its comments.
                if path.endswith(".image") or "\n" in text or not (match := _EXAMPLE_HOST.search(text)):
                    continue
                place = f"{label(item)} has {match.group()} at {path.removeprefix('.')}"
                found.append(Finding("placeholders", State.FAILS, place, "name yours in the overlay"))
        return found or [Finding("placeholders", State.HOLDS, "no name of a domain for examples")]

    async def _check_network_policies(self) -> list[Finding]:
        policies = self._overlay.of("NetworkPolicy")
        if not policies:
            return []
        text = f"{len(policies)} policies: whether the network plug-in enforces them cannot be seen from the API"
        remedy = "try a connection that they forbid"
        found = [Finding("network policies", State.ADVICE, text, remedy)]
        try:
            namespaces = await self._list("/api/v1/namespaces")
        except ApiError as error:
            text = f"whether namespaces have the labels that they select cannot be checked: {error}"
            return [*found, Finding("network policies", State.ADVICE, text)]
        made = [_labels(item) for item in (*namespaces, *self._overlay.of("Namespace"))]
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


async def _all(*calls: Awaitable[_T]) -> list[_T]:
    """Return the results of all calls; raise the first error only once none of them runs any more."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[_T], results)


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


def _labels(item: Manifest) -> dict[str, str]:
    return (item.get("metadata") or {}).get("labels") or {}


def _described(reference: Reference) -> str:
    return reference.name + (f" ({listed(reference.keys)})" if reference.keys else "")


def _remedy(reference: Reference) -> str:
    where = f"kubectl -n {reference.namespace} " if reference.namespace else "kubectl "
    if reference.kind == "Secret":
        keys = "".join(f" --from-literal={key}=..." for key in sorted(reference.keys))
        return f"{where}create secret generic {reference.name}{keys}"
    return f"make it, or name another one; {where}get {_PLACES[reference.kind][1]} lists those that exist"


def _has_registry(image: str) -> bool:
    first, slash, _ = image.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def _floats(image: str) -> bool:
    if "@" in image:
        return False
    _, colon, tag = image.rpartition("/")[2].partition(":")
    return not colon or tag == "latest"


def _strings(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield all strings within an object, with the path to each."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _strings(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _strings(value, f"{path}[{index}]")


def _namespace_selectors(spec: Manifest) -> Iterable[Mapping[str, str]]:
    """Yield the labels by which a policy selects namespaces."""
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(direction) or ():
            for peer in rule.get(peers) or ():
                yield (peer.get("namespaceSelector") or {}).get("matchLabels") or {}
