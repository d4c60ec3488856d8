"""vLLM's own metrics, beside those of the target."""

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector

_PREFIX = "vllm:"


class VllmMetrics(Collector):
    """Collects what vLLM has registered, under its own names.

    Args:
        registry: where vLLM registers; the process's default.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        """Return nothing: names of vLLM's metrics are not known before it has started, and are no others' here."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield vLLM's metrics."""
        for metric in self._registry.collect():
            if metric.name.startswith(_PREFIX):
                yield metric
