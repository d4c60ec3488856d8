"""The Pod Security Standards, as far as pods of a deployment are likely to violate them."""

from collections.abc import Iterator
from typing import Any, Final

_RESTRICTED_VOLUMES: Final = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(spec: dict[str, Any], level: str) -> list[str]:
    """Return what a level refuses of pods, by the name of the field; none of `privileged`.

    The standards' rarer fields (sysctls, AppArmor, SELinux, /proc mounts, host ports) are not looked at.

    Args:
        spec: the specification of the pods.
        level: privileged, baseline or restricted.
    """
    found: list[str] = []
    if level in ("baseline", "restricted"):
        found += _of_baseline(spec)
    if level == "restricted":
        found += _of_restricted(spec)
    return sorted(set(found))


def _containers(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the security context of each container."""
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        yield container.get("securityContext") or {}


def _of_baseline(spec: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    if any("hostPath" in volume for volume in spec.get("volumes") or ()):
        yield "hostPath"
    if any(context.get("privileged") for context in _containers(spec)):
        yield "privileged"


def _of_restricted(spec: dict[str, Any]) -> Iterator[str]:
    pod = spec.get("securityContext") or {}
    for volume in spec.get("volumes") or ():
        yield from set(volume) - {"name"} - _RESTRICTED_VOLUMES
    for context in _containers(spec):
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if "ALL" not in ((context.get("capabilities") or {}).get("drop") or ()):
            yield "capabilities.drop"
        if not context.get("runAsNonRoot", pod.get("runAsNonRoot")):
            yield "runAsNonRoot"
        if context.get("runAsUser", pod.get("runAsUser")) == 0:
            yield "runAsUser"
        profile = context.get("seccompProfile") or pod.get("seccompProfile") or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"
