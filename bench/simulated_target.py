"""A simulated target: a stand-in for its engine, whose counters the simulation advances, under the real metrics."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from bench.deployed import Deployed
from bench.simulated_pods import Pod, Session
from bench.simulated_rounds import RoundLimits, RoundLoad, best_round
from outrider.lm.pages import KVUsage
from outrider.planning import Measurements
from target_service.counters import EngineLoad
from target_service.metrics import watch

PAGE_LEN: Final = 32
"""Positions of a page of KV cache, as `outrider.lm` has them."""


@dataclass(slots=True)
class _Engine:
    """What `target_service.metrics` reads of an engine."""

    load: EngineLoad = field(default_factory=EngineLoad)
    num_requests: int = 0
    blocks: None = None
    on_pass: Callable[[float], object] = lambda seconds: None


@dataclass(slots=True)
class _Model:
    """What it reads of a model."""

    kv_usage: KVUsage


class TargetPod(Pod):
    """A target.

    Args:
        name: of the pod.
        ready_s: when it will have started.
        site: what is deployed.
        measured: times of the models.
        kv_token_bytes: KV cache of a token, in bytes.
    """

    def __init__(self, name: str, ready_s: float, site: Deployed, measured: Measurements, kv_token_bytes: int) -> None:
        super().__init__(name, ready_s, site.target.max_sessions)
        self._measured = measured
        self._chunk_len = site.target.prefill_chunk_len
        self._limits = RoundLimits(
            site.orchestrator.num_speculative_tokens, site.target.max_pass_rows, site.target.max_decode_slowdown
        )
        page_bytes = PAGE_LEN * kv_token_bytes
        self._engine = _Engine()
        self._model = _Model(KVUsage(PAGE_LEN, page_bytes, site.target.kv_budget_bytes // page_bytes, 0, 0, 0, 0))
        watch(self.registry, cast(Any, self._engine), cast(Any, self._model), site.target)

    def run(self, now: float, step_s: float) -> list[tuple[Session, float]]:
        """Runs for a step from `now` on; returns the sessions that ended, and when."""
        decoding, prompts = self._in_memory()
        drafts = [session.draft for session in decoding if session.draft is not None]
        num_drafted = len(drafts)
        rounds = best_round(
            self._measured,
            self._limits,
            RoundLoad(
                num_decoding=len(decoding),
                num_drafted=num_drafted,
                draft_step_s=sum(draft.step_s for draft in drafts) / max(1, num_drafted),
                hit_rate=sum(draft.hit_rate for draft in drafts) / max(1, num_drafted),
                num_prompts=len(prompts),
                num_prompt_rows=sum(min(self._chunk_len, item.context - item.cached) for item in prompts),
            ),
        )
        ended: list[tuple[Session, float]] = []
        if rounds is not None:
            prompts_s = self._prefill(prompts, rounds.prompt_rows * rounds.passes_per_s, now, step_s)
            # Some of the time with prompts, the rest without.
            rounds_per_s = (prompts_s / rounds.round_s + (step_s - prompts_s) / rounds.quiet_round_s) / step_s
            for session in decoding:
                tokens_per_s = (1.0 if session.draft is None else rounds.num_tokens) * rounds_per_s
                if session.draft is not None and rounds.line:
                    session.draft.ask(1 / rounds_per_s, rounds.pass_s, rounds.line)
                used_s = min(step_s, session.remaining / tokens_per_s)
                self._output(session, used_s * tokens_per_s)
                if used_s < step_s:
                    ended.append((session, now + used_s))
        self._tell()
        return ended

    def _in_memory(self) -> tuple[list[Session], list[Session]]:
        """Returns the sessions that decode, and those with a prompt to run; the newest that do not fit wait."""
        room = self._model.kv_usage.num_pages
        decoding: list[Session] = []
        prompts: list[Session] = []
        for session in self.sessions:
            num_pages = math.ceil(session.context / PAGE_LEN)
            if num_pages > room:
                self._engine.load.num_preemptions += session.cached > 0
                session.cached = 0.0
                continue
            room -= num_pages
            (decoding if session.cached >= session.context else prompts).append(session)
        return decoding, prompts

    @staticmethod
    def _prefill(prompts: list[Session], rows_per_s: float, now: float, step_s: float) -> float:
        """Runs prompts, the oldest first; returns the seconds of the step that there were any."""
        used_s = 0.0
        for session in prompts:
            num = min(session.context - session.cached, rows_per_s * (step_s - used_s))
            used_s += num / rows_per_s
            if num < session.context - session.cached:
                session.cached += num
                return step_s
            session.cached = session.context
            if session.first_token_s is None:
                session.first_token_s = now + min(step_s, used_s)
        return used_s

    @staticmethod
    def _output(session: Session, num: float) -> None:
        session.context += num
        session.cached = session.context
        session.remaining -= num
        session.num_tokens += num

    def _tell(self) -> None:
        """Sets what metrics read."""
        load = self._engine.load
        self._engine.num_requests = load.num_active_sessions = len(self.sessions)
        # As the engine does; of a session that decodes, one token is always still to be run.
        load.note_waiting(1 + int(session.context - session.cached) for session in self.sessions)
        usage = self._model.kv_usage
        num_held = sum(math.ceil(session.cached / PAGE_LEN) for session in self.sessions)
        self._model.kv_usage = KVUsage(
            usage.page_len, usage.page_bytes, usage.num_pages, min(usage.num_pages, num_held), 0, 0, 0
        )
