"""Prometheus metrics of a target: its passes, its rounds and their speculation, its queue, its KV cache."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from outrider.lm.pages import KVUsage
from outrider.serving.metrics import PREFIX, STEP_BUCKETS_S, Readings, counter, gauge, labelled
from target_service.engine.counters import EngineLoad
from target_service.engine.identity import EngineUsage
from target_service.kv_blocks.counters import BlockCounters


def watch(registry: CollectorRegistry, engine: EngineUsage, max_sessions: int) -> None:
    """Register the metrics of an engine, before it starts.

    Args:
        registry: exposes them.
        engine: a target's.
        max_sessions: requests that it runs at once, at most.
    """
    passes = Histogram(f"{PREFIX}target_pass_seconds", "Seconds of a pass.", buckets=STEP_BUCKETS_S, registry=registry)
    engine.watch(passes.observe)
    registry.register(Readings(lambda: _present(engine, max_sessions)))


def _present(engine: EngineUsage, max_sessions: int) -> Iterable[Metric]:
    load = engine.load
    yield from _queue(engine, max_sessions)
    yield from _rounds(load)
    yield from _speculation(load)
    yield from _kv_cache(engine.kv_usage)
    yield counter("target_stale_messages", "Messages whose base or fencing token was old.", load.num_stale_messages)
    yield counter("target_invalid_proposals", "Proposals that were not a valid tree.", load.num_invalid_proposals)
    yield counter("target_preemptions", "Sessions whose KV cache was released for older ones.", load.num_preemptions)
    yield counter("target_feature_bytes", "Bytes of features that drafts were sent.", load.feature_bytes)
    if (blocks := engine.block_usage) is not None:
        outcomes = _outcomes(blocks.counters)
        yield labelled(CounterMetricFamily, "kv_blocks", "KV blocks, by outcome.", "outcome", outcomes)


def _queue(engine: EngineUsage, max_sessions: int) -> Iterator[Metric]:
    load = engine.load
    yield gauge("target_sessions_running", "Requests that are open.", engine.num_requests)
    yield gauge(
        "target_session_usage_ratio",
        "Open requests as a share of the limit.",
        engine.num_requests / max_sessions,
    )
    yield gauge(
        "target_sessions_waiting", "Open requests whose prompt has not been run yet.", load.num_waiting_sessions
    )
    yield gauge("target_max_sessions", "Requests that may be open at once.", max_sessions)
    yield gauge("target_queued_tokens", "Tokens of prompts that wait to be run.", load.num_queued_tokens)


def _rounds(load: EngineLoad) -> Iterator[Metric]:
    yield counter("target_rows", "Rows of all passes: tokens of prompts, of texts and of proposals.", load.num_tokens)
    yield counter("target_rounds", "Rounds: passes times the sessions that got output from them.", load.num_rounds)
    yield labelled(
        CounterMetricFamily,
        "target_round_seconds",
        "Seconds of all rounds, by cause: their passes, waiting for drafts, waiting for other sessions' passes.",
        "cause",
        (("model", load.round_model_s), ("wait", load.wait_s), ("queue", load.queue_s)),
    )
    yield labelled(
        CounterMetricFamily,
        "target_waits",
        "Rounds that waited for a draft, by whether anything came in time.",
        "outcome",
        (("answered", load.num_answered_waits), ("expired", load.num_expired_waits)),
    )


def _speculation(load: EngineLoad) -> Iterator[Metric]:
    found = load.speculation
    yield counter("spec_decode_num_drafts", "Rounds that verified a proposal.", found.num_drafts)
    yield counter("spec_decode_num_draft_tokens", "Tokens of verified main lines.", found.num_draft_tokens)
    yield counter("spec_decode_num_accepted_tokens", "Proposed tokens that were kept.", found.num_accepted_tokens)
    # A copy: the engine's thread may add a position meanwhile.
    positions = [(str(place), num) for place, num in enumerate(list(found.num_accepted_tokens_per_pos))]
    description = "Proposed tokens that were kept, by position."
    yield labelled(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", description, "position", positions)
    yield counter("spec_decode_num_hits", "Rounds whose own last token had been proposed.", load.num_hits)
    yield counter(
        "spec_decode_num_wanted_tokens", "Tokens of proposals that the controller requested.", load.num_wanted_tokens
    )
    yield counter(
        "spec_decode_num_rounds_without", "Rounds after which the controller requested no proposal.", load.num_without
    )
    yield labelled(
        CounterMetricFamily,
        "spec_decode_predicted_seconds",
        "Seconds of rounds, as the controller expected them and as they were measured.",
        "of",
        (("expected", load.expected_s), ("measured", load.expected_of_s)),
    )
    yield counter("spec_decode_num_proposed_nodes", "Nodes that drafts sent.", load.num_proposed_nodes)
    yield counter("spec_decode_num_verified_nodes", "Nodes that were verified.", load.num_verified_nodes)


def _kv_cache(usage: KVUsage) -> Iterator[Metric]:
    states = (
        ("held", usage.num_held),
        ("reusable", usage.num_reusable),
        ("free", max(0, usage.num_pages - usage.num_held - usage.num_reusable)),
    )
    sizes = [(state, num * usage.page_bytes) for state, num in states]
    yield gauge("kv_cache_usage_ratio", "Share of the KV cache that sessions hold.", usage.num_held / usage.num_pages)
    yield labelled(GaugeMetricFamily, "kv_cache_bytes", "Memory of the KV cache, by state.", "state", sizes)
    yield counter("prefix_cache_hit_tokens", "Tokens found instead of computed.", usage.num_hit_tokens)
    yield counter(
        "kv_cache_evicted_pages",
        "Pages evicted from the prefix cache.",
        usage.num_evicted_pages,
    )


def _outcomes(counters: BlockCounters) -> list[tuple[str, float]]:
    return [
        ("written", counters.num_written),
        ("dropped", counters.num_dropped),
        ("restored", counters.num_restored),
        ("refused", counters.num_refused),
        ("failed", counters.num_failures),
    ]
