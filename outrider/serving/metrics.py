"""Prometheus metrics of a process, exposed over HTTP.

Engines count in plain integers that are read at each scrape (`Readings`), so a pass pays for one histogram and nothing
else. Every name begins with `outrider_`. Labels have few values: nothing that a client sends becomes one, so no caller
can add series; of the names of drafters that workers send, the first few do.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import outrider
from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.metrics_http import MetricsHTTPServer

PREFIX: Final = "outrider_"

LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets of latencies that clients see: from a token on loopback to a long prompt."""
RECENT_S: Final = 60.0
"""Window in seconds of the ratios that autoscalers use."""
STEP_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets of one internal step: a pass, a commit."""


def new_registry(service: str) -> CollectorRegistry:
    """Return a registry with the metrics of every process: version, memory, CPU time, descriptors, garbage collection.

    Args:
        service: name of the service.
    """
    # They would be a second series for each counter; a restart shows in the counter itself.
    disable_created_metrics()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info(f"{PREFIX}build", "Service and version of this process.", registry=registry)
    build.info({"service": service, "version": outrider.__version__})
    return registry


class Readings(Collector):
    """Metrics that are read from their source at each scrape.

    Args:
        read: returns them; called in a thread of the metrics server, must not block.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        return self._read()


def counter(name: str, about: str, value: float) -> Metric:
    """Return a counter without labels; `_total` is added to its name."""
    return CounterMetricFamily(PREFIX + name, about, value=value)


def gauge(name: str, about: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(PREFIX + name, about, value=value)


def labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    about: str,
    label: str,
    values: Iterable[tuple[str, float]],
) -> Metric:
    """Return a metric with one label, a sample for each of its values."""
    family = kind(PREFIX + name, about, labels=[label])
    for value, number in values:
        family.add_metric([value], number)
    return family


class RecentRatio:
    """The ratio of two growing counts over a recent window: the signal that autoscalers use.

    Args:
        counts: returns the part and the whole since the start.
        window_s: seconds that it looks back, at least; up to a scrape's interval more.
        clock: gives seconds.
    """

    def __init__(
        self,
        counts: Callable[[], tuple[float, float]],
        window_s: float = RECENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self._window_s = window_s
        self._clock = clock
        self._seen = deque([(clock(), *counts())])
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the ratio and record the present counts; 0 where the whole has not grown."""
        with self._lock:
            return self._ratio(self._clock(), *self._counts())

    def _ratio(self, now: float, part: float, whole: float) -> float:
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()
        _, part_before, whole_before = self._seen[0]
        self._seen.append((now, part, whole))
        return (part - part_before) / (whole - whole_before) if whole > whole_before else 0.0


class MetricsServer:
    """Exposes a registry's metrics at http://ADDRESS/metrics, from threads of its own, until it is closed.

    Args:
        address: host:port; port 0 takes a free one.
        registry: its metrics.
    """

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        self._host, _, port = address.rpartition(":")
        if not self._host or not port.isdecimal():
            raise InvalidArgument(f"{address!r} is not host:port", "metrics_address")
        self._port = int(port)
        self._registry = registry
        self._server: MetricsHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serve; return the bound address. Raises `Unavailable` when the address cannot be bound."""
        try:
            self._server = MetricsHTTPServer(self._host.strip("[]"), self._port, self._registry)
        except OSError as error:
            raise Unavailable(f"cannot listen on {self._host}:{self._port} for metrics: {error.strerror}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        return f"{self._host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving. Blocks for half a second at most."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None
