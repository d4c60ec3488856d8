"""What an engine has done so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineLoad:
    """Counters that `GetLoad` reports; written by the engine's thread, read by any."""

    num_active_sessions: int = 0
    num_cached_sessions: int = 0
    num_preemptions: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    model_time_s: float = 0.0
    num_stale_messages: int = 0
    num_invalid_proposals: int = 0
    feature_bytes: int = 0
