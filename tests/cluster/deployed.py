"""An overlay on the cluster's node, and what tests do to it."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from outrider.client import OutriderClient
from outrider.client.retry import RetryPolicy
from tests.cluster.archive import REDIS
from tests.cluster.conversion import convert
from tests.cluster.node import DOMAIN, Node
from tests.k8s.rendering import COMPONENT, SERVICES, Manifest, kustomize

NAMESPACE: Final = "outrider"
HTTP_URL: Final = f"http://orchestrator-http.{NAMESPACE}.svc.{DOMAIN}"
_VALKEY: Final = "valkey/valkey:8.1-alpine"
_REDIS_PODS: Final = ("redis-sessions", "redis-kv-blocks")
_BUSY: Final = {
    "orchestrator": "outrider_requests_open",
    "target": "outrider_target_session_usage_ratio",
    "draft": "outrider_draft_sessions_running",
}
_READY_S: Final = 600.0

Pod = dict[str, Any]


class Deployed:
    """The objects of an overlay, applied to the cluster.

    Args:
        node: of the cluster.
        say: prints a line into the run's report.
        namespace: where they are.
    """

    def __init__(self, node: Node, say: Callable[[str], None], namespace: str = NAMESPACE) -> None:
        self.node = node
        self.namespace = namespace
        self._say = say

    def apply(self, overlay: Path | Sequence[Manifest]) -> None:
        """Renders an overlay with kustomize, converts it for this version, and applies it with its kubectl.

        Args:
            overlay: its folder, or its objects.
        """
        objects = kustomize(overlay) if isinstance(overlay, Path) else overlay
        converted = convert(objects, {_VALKEY: REDIS})
        for line in converted.changes:
            self._say(f"converted: {line}")
        for line in converted.not_taken:
            self._say(f"not taken: {line}")
        for path in converted.folders:
            self.node.make_folder(path)
        items = {"apiVersion": "v1", "kind": "List", "items": converted.objects}
        self.node.kubectl("apply", "--filename=-", stdin=json.dumps(items), timeout_s=120)

    def until_ready(self, *components: str, within_s: float = _READY_S) -> float:
        """Returns once deployments and stateful sets have all their pods Ready, and after how many seconds."""
        return self.node.until(
            lambda: self.is_ready(*components),
            f"{components or 'all'} Ready:\n{self.describe()}",
            within_s=within_s,
            every_s=0.5,
        )

    def is_ready(self, *components: str) -> bool:
        """Whether each of these (of all, without any) has as many Ready pods as it wants, of its newest template."""
        for name in components or (*SERVICES, *_REDIS_PODS):
            kind = "statefulset" if name in _REDIS_PODS else "deployment"
            item = self.get(kind, name)
            status, wanted = item["status"], item["spec"]["replicas"]
            if status.get("observedGeneration") != item["metadata"]["generation"]:
                return False
            if not wanted == status.get("readyReplicas", 0) == status.get("updatedReplicas", 0) == status["replicas"]:
                return False
        return True

    def describe(self) -> str:
        """Returns the pods as kubectl lists them."""
        return self.node.kubectl("get", "pods", f"--namespace={self.namespace}", "--output=wide")

    def pods(self, component: str) -> list[Pod]:
        """Returns the pods of a component that are not terminating, the oldest first."""
        listed = self.get("pods", f"--selector={COMPONENT}={component}")["items"]
        alive = [
            item
            for item in listed
            if "deletionTimestamp" not in item["metadata"] and item["status"]["phase"] in ("Pending", "Running")
        ]
        return sorted(alive, key=lambda item: (item["metadata"]["creationTimestamp"], item["metadata"]["name"]))

    def ready_pods(self, component: str) -> list[Pod]:
        """Returns those of them that are Ready."""
        return [item for item in self.pods(component) if _is_ready(item)]

    def busiest(self, component: str) -> Pod:
        """Returns the Ready pod of a service that has the most requests or sessions now, by its own /metrics."""
        return max(self.ready_pods(component), key=lambda pod: _metric(pod, _BUSY[component]))

    def scale(self, **replicas: int) -> None:
        """Gives services a number of pods, by the bounds of their autoscalers; returns once they are Ready."""
        for name, number in replicas.items():
            self.patch("hpa", name, {"spec": {"minReplicas": number, "maxReplicas": number}})
        self.node.until(
            lambda: all(
                self.get("deployment", name)["spec"]["replicas"] == number for name, number in replicas.items()
            ),
            f"the autoscalers keep within their bounds: {replicas}",
        )
        self.until_ready(*replicas)

    def scale_to_two(self) -> None:
        """Gives every service two pods, whatever a test before did."""
        self.scale(**dict.fromkeys(SERVICES, 2))
        self.until_ready()

    def patch(self, kind: str, name: str, changes: Mapping[str, Any], *, how: str = "merge") -> None:
        """Changes an object."""
        self.node.kubectl(
            "patch", kind, name, f"--namespace={self.namespace}", f"--type={how}", f"--patch={json.dumps(changes)}"
        )

    def configure(self, component: str, **settings: str) -> None:
        """Gives a deployment's container further environment variables, which starts its pods anew; waits for it."""
        given = [f"{name}={value}" for name, value in settings.items()]
        self.node.kubectl("set", "env", f"deployment/{component}", f"--namespace={self.namespace}", *given)
        self.until_ready(component)

    def unset(self, component: str, *names: str) -> None:
        """Takes environment variables of `configure` away again; waits for the new pods."""
        self.node.kubectl(
            "set", "env", f"deployment/{component}", f"--namespace={self.namespace}", *(f"{name}-" for name in names)
        )
        self.until_ready(component)

    def use_images(self, tags: Mapping[str, str]) -> float:
        """Gives services the images with a tag, by rolling updates at once; returns the seconds until all are Ready."""
        for name, tag in tags.items():
            image = f"{name}=outrider/{name}:{tag}"
            self.node.kubectl("set", "image", f"deployment/{name}", f"--namespace={self.namespace}", image)
        return self.until_ready(*tags)

    def until_replicas(self, component: str, number: int, within_s: float, describe: Callable[[], str]) -> None:
        """Returns once a deployment is to have this many pods."""
        try:
            self.node.until(
                lambda: self.replicas(component) == number, f"{component} has {number} replicas", within_s=within_s
            )
        except AssertionError as error:
            autoscaler = self.node.kubectl("describe", "hpa", component, f"--namespace={self.namespace}")
            raise AssertionError(f"{error}\n{autoscaler}\n{describe()}") from None

    def delete(self, pod: Pod) -> None:
        """Deletes a pod, as `kubectl delete pod` does; does not wait until it is gone."""
        self.node.kubectl("delete", "pod", _name(pod), f"--namespace={self.namespace}", "--wait=false")

    def kill(self, pod: Pod) -> None:
        """Ends the process of a pod by kill -9."""
        (status,) = pod["status"]["containerStatuses"]
        os.kill(self.node.pid_of(status["containerID"].removeprefix("containerd://")), signal.SIGKILL)

    def exec(self, pod: str, *command: str, is_checked: bool = True) -> str:
        """Runs a command in a pod; returns what it prints."""
        return self.node.kubectl("exec", pod, f"--namespace={self.namespace}", "--", *command, is_checked=is_checked)

    def logs(self, pod: Pod) -> str:
        """Returns what a pod has logged."""
        return self.node.kubectl("logs", _name(pod), f"--namespace={self.namespace}")

    def get(self, kind: str, *arguments: str) -> dict[str, Any]:
        """Returns an object, or a list of them."""
        found: dict[str, Any] = json.loads(
            self.node.kubectl("get", kind, *arguments, f"--namespace={self.namespace}", "--output=json")
        )
        return found

    def replicas(self, component: str) -> int:
        """Returns how many pods a deployment is to have."""
        return int(self.get("deployment", component)["spec"]["replicas"])

    def client(self, address: str = "", *, max_attempts: int = 60, **access: Any) -> OutriderClient:
        """Returns a client that goes by the orchestrator's Service, or by an address; it does not give up soon.

        Args:
            address: another one than the Service's.
            max_attempts: of each request.
            access: the client's `token` and `tls`.
        """
        address = address or f"dns:///orchestrator.{self.namespace}.svc.{DOMAIN}:50051"
        return OutriderClient(address, retry=RetryPolicy(max_attempts=max_attempts, max_backoff_s=0.5), **access)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs what waits for kubectl while streams go on."""
        return await asyncio.to_thread(function, *arguments)


def _is_ready(pod: Pod) -> bool:
    conditions: Sequence[Mapping[str, str]] = pod["status"].get("conditions", ())
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _metric(pod: Pod, name: str) -> float:
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:9090/metrics", timeout=20) as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def _name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])
