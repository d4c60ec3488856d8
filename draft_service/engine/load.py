"""Limits of a draft's engine, and the counters that it publishes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sessions that an engine may hold.

    Attributes:
        max_sessions: sessions open at once.
        max_cached_sessions: sessions remembered, open or idle, at most; open ones always are.
        idle_ttl_s: seconds that an idle session is remembered.
    """

    max_sessions: int
    max_cached_sessions: int
    idle_ttl_s: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Counters of an engine since its start; see GetLoadResponse.

    Attributes:
        num_active_sessions: open sessions.
        num_cached_sessions: open or idle sessions.
        kv_used_bytes: memory of their caches.
        num_passes: steps of the drafter.
        model_time_s: seconds of all steps.
        num_tokens: tokens that all steps ran.
        num_stale_messages: messages whose base or fencing token was old.
        num_nodes: nodes that were sent.
        num_requested: times that a session requested a proposal.
        num_late: of these, those whose text went on before a node was there, because other sessions' were made first.
        shared_time_s: seconds of all steps that a session alone would not have taken.
    """

    num_active_sessions: int = 0
    num_cached_sessions: int = 0
    kv_used_bytes: int = 0
    num_passes: int = 0
    model_time_s: float = 0.0
    num_tokens: int = 0
    num_stale_messages: int = 0
    num_nodes: int = 0
    num_requested: int = 0
    num_late: int = 0
    shared_time_s: float = 0.0
