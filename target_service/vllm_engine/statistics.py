"""A reader of vLLM's own statistics, for the counters that the target reports."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class CacheStatistics(StatLoggerBase):  # type: ignore[misc]
    """Sums over the steps of vLLM.

    Attributes:
        num_hit_tokens: tokens that its prefix cache had.
    """

    def __init__(self, *args: object) -> None:
        self.num_hit_tokens = 0

    def record(self, scheduler_stats: Any, *args: object, **kwargs: object) -> None:
        """Add a step."""
        if scheduler_stats is not None:
            self.num_hit_tokens += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Log nothing."""
