"""Prometheus metrics of a draft: its load, its proposals, and those that came too late."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric

from draft_service.engine.engine import Engine
from draft_service.settings import DraftSettings
from outrider.serving.metrics import Readings, RecentRatio, counter, gauge


def watch(registry: CollectorRegistry, engine: Engine, settings: DraftSettings) -> None:
    """Register the metrics of an engine.

    Args:
        registry: exposes them.
        engine: a draft's.
        settings: its limits.
    """
    busy = RecentRatio(lambda: (engine.load.model_time_s, time.monotonic()))
    shared = RecentRatio(lambda: (engine.load.shared_time_s, time.monotonic()))
    late = RecentRatio(lambda: (engine.load.num_late, engine.load.num_requested))
    registry.register(Readings(lambda: _present(engine, settings, busy(), shared(), late())))


def _present(engine: Engine, settings: DraftSettings, busy: float, shared: float, late: float) -> Iterable[Metric]:
    load = engine.load
    yield gauge("draft_busy_ratio", "Share of the last minute that the drafter's thread worked.", min(1.0, busy))
    yield gauge(
        "draft_shared_ratio",
        "Share of the last minute that the drafter's thread worked longer than one session alone needed.",
        min(1.0, shared),
    )
    yield gauge(
        "draft_late_ratio", "Share of the last minute's proposals that came too late because of other sessions.", late
    )
    yield gauge("draft_sessions_running", "Sessions that are open.", load.num_active_sessions)
    yield gauge("draft_max_sessions", "Sessions that may be open at once.", settings.max_sessions)
    yield counter("draft_steps", "Steps of the drafter.", load.num_passes)
    yield counter("draft_busy_seconds", "Seconds of all steps.", load.model_time_s)
    yield counter("draft_rows", "Tokens that all steps ran.", load.num_tokens)
    yield counter("draft_nodes", "Nodes that were proposed.", load.num_nodes)
    yield counter("draft_proposals", "Times that a session requested a proposal.", load.num_requested)
    yield counter(
        "draft_late_proposals", "Of these, those that came too late because of other sessions.", load.num_late
    )
    yield counter("draft_stale_messages", "Messages whose base or fencing token was old.", load.num_stale_messages)
    yield gauge("draft_cache_bytes", "Memory of the sessions' caches.", load.kv_used_bytes)
