"""What Prometheus and its metrics adapter know of simulated pods: samples as old as the last scrape, and averages."""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry


@dataclass(slots=True)
class _Scraped:
    """When a pod is looked at next, and what was seen."""

    registry: CollectorRegistry
    next_s: float
    samples: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)


class Scrapes:
    """Collects registries as Prometheus does, and answers as the metrics adapter does.

    Args:
        metrics: names of the metrics that are asked for, which have no labels.
        scrape_s: seconds between two scrapes of a pod.
        average_s: seconds over which an answer is the average.
        clock: gives seconds.
    """

    def __init__(self, metrics: Collection[str], scrape_s: float, average_s: float, clock: Callable[[], float]) -> None:
        self._metrics = frozenset(metrics)
        self._scrape_s = scrape_s
        self._average_s = average_s
        self._clock = clock
        self._pods: dict[str, _Scraped] = {}

    def add(self, pod: str, registry: CollectorRegistry, offset: float) -> None:
        """Begins to scrape a pod, whose metrics can be read from now on.

        Args:
            pod: its name.
            registry: what it tells.
            offset: when in the interval its turn is, as a share of it; Prometheus spreads its targets.
        """
        self._pods[pod] = _Scraped(registry, self._clock() + offset % 1 * self._scrape_s)

    def remove(self, pod: str) -> None:
        """Forgets a pod that has ended."""
        self._pods.pop(pod, None)

    def run(self) -> None:
        """Scrapes all whose turn it is."""
        now = self._clock()
        for pod in self._pods.values():
            if pod.next_s <= now:
                pod.next_s += self._scrape_s
                pod.samples.append((now, self._read(pod.registry)))

    def values(self, pod: str) -> dict[str, int]:
        """Returns the averages of a pod's metrics, in whole thousandths; none where it was not scraped of late."""
        scraped = self._pods.get(pod)
        if scraped is None:
            return {}
        samples = scraped.samples
        while samples and samples[0][0] <= self._clock() - self._average_s:
            samples.popleft()
        names = samples[0][1] if samples else ()
        return {name: int(1000 * sum(sample[name] for _, sample in samples) / len(samples)) for name in names}

    def _read(self, registry: CollectorRegistry) -> dict[str, float]:
        families = registry.collect()
        found = (sample for family in families for sample in family.samples if sample.name in self._metrics)
        return {sample.name: sample.value for sample in found}
