"""A small custom metrics adapter, in place of prometheus-adapter and a Prometheus.

It scrapes the pods' own /metrics and answers the autoscaling controller with each pod's average over a window.
"""

import json
import ssl
import threading
import time
import urllib.request
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.node import ADDRESS, Node

GROUP: Final = "custom.metrics.k8s.io"
VERSION: Final = "v1beta1"
PATH: Final = f"/apis/{GROUP}/{VERSION}"
_NAMESPACE: Final = "kube-system"
_NAME: Final = "metrics-adapter"
_METRICS_PORT: Final = 9090
_EVERY_S: Final = 1.0
_SCRAPE_S: Final = 3.0


class MetricsAdapter:
    """Serves the custom metrics API for the pods of one namespace while its context is open.

    Args:
        node: of the cluster.
        namespace: of the pods.
        names: of the metrics, as the autoscalers have them.
        window_s: seconds over which a metric is averaged; the rules have a minute.
    """

    def __init__(self, node: Node, namespace: str, names: set[str], window_s: float) -> None:
        self._node, self._namespace, self._names, self._window_s = node, namespace, names, window_s
        self._samples: dict[tuple[str, str], deque[tuple[float, float]]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._server = _Server(self)
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._server.serve_forever, self._scrape)
        ]

    def __enter__(self) -> "MetricsAdapter":
        certificate, key = self._node.issue_certificate(_NAME)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        for thread in self._threads:
            thread.start()
        self._register()
        return self

    def __exit__(self, *_: object) -> None:
        self._node.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}")
        self._is_ended.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def values(self, name: str, selector: str = "") -> dict[str, float]:
        """Returns the average of a metric over the window, of each pod that has it.

        Args:
            name: of the metric.
            selector: of the pods' labels.
        """
        pods = {pod["metadata"]["name"] for pod in self._pods(selector)}
        now = time.monotonic()
        with self._lock:
            found = {}
            for (pod, metric), samples in self._samples.items():
                values = [value for at, value in samples if at > now - self._window_s]
                if metric == name and pod in pods and values:
                    found[pod] = sum(values) / len(values)
        return found

    def describe(self) -> str:
        """Returns the averages of all metrics."""
        return "\n".join(f"{name}: {self.values(name)}" for name in sorted(self._names))

    def answer(self, path: str) -> dict[str, Any] | None:
        """Returns the answer to a call of the API server; None for what there is not."""
        parts = urlsplit(path)
        if parts.path.rstrip("/") == PATH:
            kind = {"singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
            resources = [{"name": f"pods/{name}", **kind} for name in sorted(self._names)]
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": resources,
            }
        # The API server escapes the star that is for all pods.
        prefix, _, name = unquote(parts.path).rpartition("/")
        if prefix != f"{PATH}/namespaces/{self._namespace}/pods/*" or name not in self._names:
            return None
        values = self.values(name, parse_qs(parts.query).get("labelSelector", [""])[0])
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = [
            {
                "describedObject": {"kind": "Pod", "namespace": self._namespace, "name": pod, "apiVersion": "/v1"},
                "metricName": name,
                "timestamp": now,
                "value": f"{round(1000 * value)}m",
            }
            for pod, value in values.items()
        ]
        return {"kind": "MetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}

    def _register(self) -> None:
        port = self._server.server_address[1]
        metadata = {"name": _NAME, "namespace": _NAMESPACE}
        items = [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": metadata,
                "spec": {"ports": [{"port": 443, "targetPort": port}]},
            },
            {
                "apiVersion": "v1",
                "kind": "Endpoints",
                "metadata": metadata,
                "subsets": [{"addresses": [{"ip": ADDRESS}], "ports": [{"port": port}]}],
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{VERSION}.{GROUP}"},
                "spec": {
                    "group": GROUP,
                    "version": VERSION,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {"name": _NAME, "namespace": _NAMESPACE, "port": 443},
                },
            },
        ]
        self._node.kubectl(
            "apply", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        )
        self._node.kubectl(
            "wait", "--for=condition=Available", f"apiservice/{VERSION}.{GROUP}", "--timeout=60s", timeout_s=70
        )

    def _pods(self, selector: str = "") -> list[dict[str, Any]]:
        listed = self._node.call("GET", f"/api/v1/namespaces/{self._namespace}/pods?labelSelector={selector}")
        return [
            item for item in listed["items"] if item["status"].get("podIP") and item["status"]["phase"] == "Running"
        ]

    def _scrape(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            while not self._is_ended.wait(_EVERY_S):
                try:
                    pods = self._pods()
                except (OSError, ValueError):
                    continue
                list(pool.map(self._scrape_pod, pods))

    def _scrape_pod(self, pod: dict[str, Any]) -> None:
        try:
            url = f"http://{pod['status']['podIP']}:{_METRICS_PORT}/metrics"
            with urllib.request.urlopen(url, timeout=_SCRAPE_S) as response:
                text = response.read().decode()
        except OSError:
            # It starts, it ends, or it is a Redis, which exposes none.
            return
        now = time.monotonic()
        with self._lock:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in self._names:
                        samples = self._samples[pod["metadata"]["name"], sample.name]
                        samples.append((now, sample.value))
                        while samples[0][0] < now - self._window_s:
                            samples.popleft()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, adapter: MetricsAdapter) -> None:
        self.adapter = adapter
        super().__init__((ADDRESS, 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        try:
            answer = self.server.adapter.answer(self.path)
        except (OSError, ValueError):
            self.send_error(503)
            return
        if answer is None:
            self.send_error(404)
            return
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Calls come every second."""
