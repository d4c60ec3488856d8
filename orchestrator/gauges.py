"""Gauges of an orchestrator, read at each scrape: open requests, and workers."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily

from orchestrator.api.admission import Admission
from orchestrator.workers.replicas import Replicas
from outrider.serving.metrics import PREFIX, Readings, gauge


def register_gauges(registry: CollectorRegistry, admission: Admission, replicas: Replicas) -> None:
    """Expose the number of requests and of workers at the time of each scrape."""
    registry.register(Readings(lambda: _read(admission, replicas)))


def _read(admission: Admission, replicas: Replicas) -> Iterable[Metric]:
    yield gauge("num_requests_running", "Requests that are generating.", admission.num_active)
    yield gauge("num_requests_waiting", "Requests that wait for admission.", admission.num_queued)
    num_open = admission.num_active + admission.num_queued
    yield gauge("requests_open", "Requests that are generating or waiting.", num_open)
    yield gauge("max_requests_running", "Requests that may generate at once.", admission.max_active)
    about = "Share of the KV cache of all targets in rotation that sessions hold; 1 where there is no target."
    yield gauge("targets_kv_cache_usage_ratio", about, replicas.kv_cache_usage)
    workers = GaugeMetricFamily(
        f"{PREFIX}workers", "Workers that this orchestrator has found.", labels=["role", "in_rotation"]
    )
    for role, num_in, num_out in replicas.counts():
        workers.add_metric([role, "true"], num_in)
        workers.add_metric([role, "false"], num_out)
    yield workers
