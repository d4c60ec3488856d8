"""A rendered overlay: the objects that `kubectl kustomize` prints, and what they need of a cluster."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from outrider.errors import InvalidArgument, Unavailable

Manifest: TypeAlias = dict[str, Any]

STANDARD_INPUT: Final = "-"
PULL_KEY: Final = ".dockerconfigjson"
"""Of the Secrets by which images are pulled."""
_RENDER_S: Final = 60.0
_MAX_BYTES: Final = 64 << 20
_KUBECTL_MINOR: Final = 30
"""Of the oldest kubectl, 1.30, whose kustomize is tried with the manifests; much older ones know no components."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that another one names.

    Attributes:
        kind: its kind.
        name: its name.
        namespace: its namespace; empty where the kind has none.
        user: the object that names it, such as Deployment/target.
        keys: keys of its data that are read.
        is_optional: whether the user does without it.
    """

    kind: str
    name: str
    namespace: str
    user: str
    keys: frozenset[str] = frozenset()
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """The pods that an object of the overlay makes.

    Attributes:
        owner: the object, such as Deployment/target.
        namespace: where they run.
        spec: their specification.
    """

    owner: str
    namespace: str
    spec: Manifest

    @property
    def containers(self) -> list[Manifest]:
        """All containers, those that run first included."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


@dataclass(frozen=True, slots=True)
class Overlay:
    """The objects of a rendered overlay.

    Attributes:
        objects: as they are applied.
        namespace: of objects that name none.
    """

    objects: Sequence[Manifest]
    namespace: str = "default"

    def of(self, *kinds: str) -> list[Manifest]:
        """Return the objects of some kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def namespace_of(self, item: Manifest) -> str:
        """Return the namespace of an object."""
        return str(item["metadata"].get("namespace") or self.namespace)

    @property
    def namespaces(self) -> list[str]:
        """The namespaces of all pods, sorted; that of objects that name none where there are no pods."""
        return sorted({template.namespace for template in self.pod_templates()}) or [self.namespace]

    def pod_templates(self) -> list[PodTemplate]:
        """Return what makes pods, whatever its kind: everything with a `spec` that has `containers`."""
        return [
            PodTemplate(label(item), self.namespace_of(item), spec)
            for item in self.objects
            for spec in _pod_specs(item)
        ]

    def claims(self) -> list[tuple[str, Manifest]]:
        """Return the specification of each PersistentVolumeClaim that the overlay makes, with the object's label."""
        found = [(label(item), item.get("spec") or {}) for item in self.of("PersistentVolumeClaim")]
        for item in self.of("StatefulSet"):
            found += [(label(item), claim["spec"]) for claim in item["spec"].get("volumeClaimTemplates") or ()]
        return found

    def references(self) -> list[Reference]:
        """Return the objects that others name, without those that the overlay itself makes."""
        made = {(item["kind"], item["metadata"]["name"]) for item in self.objects}
        made |= {("Secret", item["spec"]["secretName"]) for item in self.of("Certificate")}
        named: list[Reference] = []
        for template in self.pod_templates():
            named += self._of_pod(template)
        for item in self.objects:
            named += _of_object(item, self.namespace_of(item))
        return _joined(reference for reference in named if (reference.kind, reference.name) not in made)

    def _of_pod(self, template: PodTemplate) -> Iterator[Reference]:
        spec, where, user = template.spec, template.namespace, template.owner
        for container in template.containers:
            for source in container.get("envFrom") or ():
                for field_name, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                    if named := source.get(field_name):
                        yield Reference(kind, named["name"], where, user, is_optional=bool(named.get("optional")))
            for item in container.get("env") or ():
                source = item.get("valueFrom") or {}
                for field_name, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                    if named := source.get(field_name):
                        keys = frozenset({named["key"]})
                        yield Reference(kind, named["name"], where, user, keys, bool(named.get("optional")))
        for volume in spec.get("volumes") or ():
            paths = frozenset(self._paths_in(template, volume["name"]))
            yield from _of_volume(volume, where, user, paths)
        for named in spec.get("imagePullSecrets") or ():
            yield Reference("Secret", named["name"], where, user, frozenset({PULL_KEY}))
        account = spec.get("serviceAccountName") or "default"
        if account != "default":
            yield Reference("ServiceAccount", account, where, user)
        if (name := spec.get("priorityClassName")) and not name.startswith("system-"):
            yield Reference("PriorityClass", name, "", user)
        if name := spec.get("runtimeClassName"):
            yield Reference("RuntimeClass", name, "", user)

    def _paths_in(self, template: PodTemplate, volume: str) -> Iterator[str]:
        """Yield the files of a volume that containers are told to read: by a variable, or as the mount itself."""
        for container in template.containers:
            for mount in container.get("volumeMounts") or ():
                if mount["name"] != volume:
                    continue
                if mount.get("subPath"):
                    yield mount["subPath"]
                    continue
                start = mount["mountPath"].rstrip("/") + "/"
                for value in self._variables(container):
                    if value.startswith(start) and value != start:
                        yield value.removeprefix(start)

    def _variables(self, container: Manifest) -> Iterator[str]:
        """Yield the values of a container's variables, those of the overlay's ConfigMaps included."""
        maps = {item["metadata"]["name"]: item.get("data") or {} for item in self.of("ConfigMap")}
        for source in container.get("envFrom") or ():
            yield from maps.get((source.get("configMapRef") or {}).get("name", ""), {}).values()
        for item in container.get("env") or ():
            if "value" in item:
                yield item["value"]


def label(item: Manifest) -> str:
    """Return an object as its kind and name, such as Deployment/target."""
    return f"{item['kind']}/{item['metadata']['name']}"


def read_overlay(place: str, namespace: str = "") -> Overlay:
    """Return an overlay.

    Args:
        place: a folder with a kustomization, which is rendered; a file with rendered objects; or "-" for the input.
        namespace: of objects that name none; empty for `default`.

    Raises:
        InvalidArgument: there is no such place, it cannot be rendered, it has no objects, or another namespace.
        Unavailable: a folder is to be rendered, and there is no kubectl.
    """
    objects = list(_objects(_text(place), place))
    if not objects:
        raise InvalidArgument(f"{_shown(place)} has no objects", "overlay")
    named = {item["metadata"]["namespace"] for item in objects if item["metadata"].get("namespace")}
    if namespace and named and namespace not in named:
        raise InvalidArgument(
            f"namespace is {namespace}, the objects of {_shown(place)} have {', '.join(sorted(named))}", "namespace"
        )
    return Overlay(objects, namespace or "default")


def _text(place: str) -> str:
    if place == STANDARD_INPUT:
        return _bounded(sys.stdin.read(_MAX_BYTES + 1), place)
    path = Path(place)
    if path.is_dir():
        return _rendered(path)
    try:
        with path.open(encoding="utf-8") as file:
            return _bounded(file.read(_MAX_BYTES + 1), place)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidArgument(f"cannot read {place}: {reason}", "overlay") from None


def _bounded(text: str, place: str) -> str:
    if len(text) > _MAX_BYTES:
        raise InvalidArgument(f"{_shown(place)} is longer than {_MAX_BYTES >> 20} MiB", "overlay")
    return text


def _rendered(folder: Path) -> str:
    beside = Path(sys.executable).with_name("kubectl")
    kubectl = shutil.which("kubectl") or (str(beside) if beside.is_file() else None)
    if kubectl is None:
        raise Unavailable(f"kubectl renders {folder}, and is not installed; or give the objects to `--overlay -`")
    try:
        done = subprocess.run(
            [kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=_RENDER_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"kubectl kustomize {folder} took more than {_RENDER_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        problem = lines[-1].removeprefix("error: ")
        raise InvalidArgument(f"kubectl kustomize {folder}: {problem}{_too_old(kubectl)}", "overlay")
    return done.stdout


def _too_old(kubectl: str) -> str:
    """Return what to say of a kubectl that is older than the manifests; nothing of others."""
    try:
        done = subprocess.run(
            [kubectl, "version", "--client", "--output=json"],
            capture_output=True,
            text=True,
            timeout=_RENDER_S,
            check=False,
        )
        minor = int(json.loads(done.stdout)["clientVersion"]["minor"].rstrip("+"))
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError, AttributeError):
        return ""
    if minor >= _KUBECTL_MINOR:
        return ""
    return f"; {kubectl} is of 1.{minor}: take one of 1.{_KUBECTL_MINOR} or newer, or give the objects to `--overlay -`"


def _objects(text: str, place: str) -> Iterator[Manifest]:
    import yaml

    try:
        documents = list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, RecursionError) as error:
        problem = str(getattr(error, "problem", None) or type(error).__name__)
        raise InvalidArgument(f"{_shown(place)} is no YAML: {problem}", "overlay") from None
    for document in documents:
        if document is None:
            continue
        for item in document["items"] if _is_list(document) else [document]:
            if not _is_object(item):
                raise InvalidArgument(f"{_shown(place)} has a document that is no Kubernetes object", "overlay")
            yield item


def _is_list(document: Any) -> bool:
    return isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list)


def _is_object(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and all(isinstance(item.get(name), str) for name in ("apiVersion", "kind"))
        and isinstance(item.get("metadata"), dict)
        and isinstance(item["metadata"].get("name"), str)
    )


def _shown(place: str) -> str:
    return "standard input" if place == STANDARD_INPUT else place


def _pod_specs(node: Any) -> Iterator[Manifest]:
    if isinstance(node, dict):
        spec = node.get("spec")
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield spec
            return
        for value in node.values():
            yield from _pod_specs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _pod_specs(value)


def _of_volume(volume: Manifest, where: str, user: str, paths: frozenset[str]) -> Iterator[Reference]:
    """Yield what a volume of a pod is made of; `paths` are its files that containers read."""
    sources = [volume, *((volume.get("projected") or {}).get("sources") or ())]
    for source in sources:
        for field_name, kind, name_field in (("secret", "Secret", "secretName"), ("configMap", "ConfigMap", "name")):
            if named := source.get(field_name):
                items = named.get("items") or ()
                keys = frozenset(item["key"] for item in items)
                # Several sources of one volume: which of them has a file cannot be told.
                if not items and len(sources) == 1:
                    keys = paths
                name = named.get(name_field) or named.get("name")
                yield Reference(kind, name, where, user, keys, bool(named.get("optional")))
    if claim := volume.get("persistentVolumeClaim"):
        yield Reference("PersistentVolumeClaim", claim["claimName"], where, user)


def _of_object(item: Manifest, where: str) -> Iterator[Reference]:
    """Yield what an object that is no pod names."""
    spec, user = item.get("spec") or {}, label(item)
    match item["kind"]:
        case "Ingress":
            if name := spec.get("ingressClassName"):
                yield Reference("IngressClass", name, "", user)
            for entry in spec.get("tls") or ():
                if name := entry.get("secretName"):
                    yield Reference("Secret", name, where, user, frozenset({"tls.crt", "tls.key"}))
        case "HTTPRoute" | "GRPCRoute" | "TLSRoute":
            for parent in spec.get("parentRefs") or ():
                kind = parent.get("kind", "Gateway")
                yield Reference(kind, parent["name"], parent.get("namespace") or where, user)
        case "Gateway":
            yield Reference("GatewayClass", spec["gatewayClassName"], "", user)
            for listener in spec.get("listeners") or ():
                for named in (listener.get("tls") or {}).get("certificateRefs") or ():
                    keys = frozenset({"tls.crt", "tls.key"})
                    yield Reference("Secret", named["name"], named.get("namespace") or where, user, keys)
        case "Certificate":
            issuer = spec["issuerRef"]
            kind = issuer.get("kind", "Issuer")
            yield Reference(kind, issuer["name"], "" if kind == "ClusterIssuer" else where, user)
        case "InferencePool":
            picker = spec["endpointPickerRef"]
            yield Reference(picker.get("kind", "Service"), picker["name"], where, user)
        case "TriggerAuthentication":
            for named in spec.get("secretTargetRef") or ():
                yield Reference("Secret", named["name"], where, user, frozenset({named["key"]}))


def _joined(references: Iterable[Reference]) -> list[Reference]:
    """Return one reference for each object: with all keys and users, and optional where it is for all of them."""
    found: dict[tuple[str, str, str, bool], Reference] = {}
    for reference in references:
        identity = (reference.kind, reference.namespace, reference.name, reference.is_optional)
        known = found.get(identity)
        if known is not None:
            users = known.user if reference.user in known.user.split(", ") else f"{known.user}, {reference.user}"
            reference = replace(known, user=users, keys=known.keys | reference.keys)
        found[identity] = reference
    return list(found.values())


def quantity(text: str | float) -> float:
    """Return a quantity of Kubernetes, such as 500m, 4Gi or 2, as a number; raise `InvalidArgument`."""
    digits = str(text).rstrip("".join(_SUFFIX_LETTERS))
    suffix = str(text).removeprefix(digits)
    try:
        return float(digits) * _SUFFIXES[suffix]
    except (KeyError, ValueError):
        raise InvalidArgument(f"{text!r} is no quantity", "overlay") from None


_SUFFIXES: Final[Mapping[str, float]] = {
    "": 1,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    **{letter: 10.0 ** (3 * power) for power, letter in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{f"{letter}i": 1024.0**power for power, letter in enumerate(("K", "M", "G", "T", "P", "E"), 1)},
}
_SUFFIX_LETTERS: Final = "numkMGTPEKi"
