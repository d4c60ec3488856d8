"""Simulated drafts and orchestrators: stand-ins, whose counters the simulation advances, under the real metrics.

A simulation goes in steps, in which tokens are a fluid: what a pod does in a step is its rates times the step's length.
Targets are in `bench.simulated_target`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, cast

from prometheus_client import CollectorRegistry

import draft_service.metrics
from bench.deployed import Deployed
from bench.hpa import Phase
from draft_service.engine import EngineLoad as DraftLoad
from orchestrator.metrics import OrchestratorMetrics
from outrider.planning import Measurements

_NODES_A_STEP: Final = 6
"""Nodes by which a step makes the tree of a session larger where drafts run ahead (`outrider bench distance`: 37 in 6.2
steps a round)."""


@dataclass(slots=True, eq=False)
class Session:
    """A client's request, and what its next ones go on from.

    Attributes:
        context: tokens of prompts and outputs so far.
        remaining: output tokens that are to come.
        arrived_s: when the request came.
        refused_s: when it was last told that there is no place, or came.
        cached: of the context, tokens that its target has run.
        num_turns: requests that this conversation is to have after this one.
        first_token_s: when its first token came; None before.
        orchestrator: that it is at.
        target: that it is at.
        draft: that it is at.
        warm: target that has its KV cache.
        num_tokens: output tokens since this was last set to 0.
        decoding_s: seconds that it has waited for these, from the first token of a request on.
        was_late: whether it has waited too long for a first token since this was last set.
    """

    context: float = 0.0
    remaining: float = 0.0
    arrived_s: float = 0.0
    refused_s: float = 0.0
    cached: float = 0.0
    num_turns: int = 0
    first_token_s: float | None = None
    orchestrator: "OrchestratorPod | None" = None
    target: "Pod | None" = None
    draft: "DraftPod | None" = None
    warm: "Pod | None" = None
    num_tokens: float = 0.0
    decoding_s: float = 0.0
    was_late: bool = False


class Pod:
    """A pod of any service.

    Args:
        name: of the pod.
        ready_s: when it will have started.
        max_sessions: that it takes at once.

    Attributes:
        registry: its metrics, once it is ready.
        sessions: that it has, in the order in which they came.
        hand_over_s: when it gives away what it still has; None while it is not to go.
    """

    def __init__(self, name: str, ready_s: float, max_sessions: int) -> None:
        self.name = name
        self.max_sessions = max_sessions
        self.ready_s = ready_s
        self.is_ready = False
        self.registry = CollectorRegistry()
        self.sessions: dict[Session, None] = {}
        self.hand_over_s: float | None = None

    @property
    def phase(self) -> Phase:
        """What the autoscaler sees: a pod that loads its model runs, but tells no metrics yet."""
        return Phase.RUNNING if self.hand_over_s is None else Phase.TERMINATING

    @property
    def is_in_rotation(self) -> bool:
        """Whether it gets new sessions, as far as it has places."""
        return self.is_ready and self.hand_over_s is None

    @property
    def has_place(self) -> bool:
        """Whether it gets the next one."""
        return self.is_in_rotation and len(self.sessions) < self.max_sessions


@dataclass(slots=True)
class _DraftEngine:
    """What `draft_service.metrics` reads of an engine."""

    load: DraftLoad = field(default_factory=DraftLoad)


class DraftPod(Pod):
    """A draft; what its engine counts follows from the steps that its sessions want.

    In each round a session wants a step for each token of its main line, or, where drafts run ahead and these are more,
    steps of six nodes until it has `lookahead_nodes`: as if nothing were left of its tree, which is the most that it
    can be. A step brings all sessions further that want one then. With M of them, who each want w a second, a session
    wants a step for the share f of the time, and the draft is busy for b of it:

        f = w D(f M), at most 1        b = 1 - (1 - f)^M        D(m) = draft_step_s + m draft_row_s

    A step has f M / b sessions on average; what it takes longer than D(1) was shared. A new tree's first node comes
    after one to two steps, and is late where the target went on before that.

    Args:
        name: of the pod.
        ready_s: when it will have started.
        site: what is deployed.
        measured: times of the models.
        clock: gives seconds.
    """

    def __init__(
        self, name: str, ready_s: float, site: Deployed, measured: Measurements, clock: Callable[[], float]
    ) -> None:
        super().__init__(name, ready_s, site.draft.max_sessions)
        self._measured = measured
        self._patience_s = site.orchestrator.draft_max_wait_s
        self._lookahead_nodes = site.orchestrator.lookahead_nodes
        self.step_s = self._duration_s(1)
        """Seconds of a step with all sessions that decode."""
        self.hit_rate = measured.hit_rate
        """Share of rounds whose proposal is there at once: less where there was no time to run ahead."""
        self._asks: list[tuple[float, float, int]] = []
        self._counts = {"model_time_s": 0.0, "shared_time_s": 0.0, "num_asked": 0.0, "num_late": 0.0}
        self._engine = _DraftEngine()
        draft_service.metrics.watch(self.registry, cast(Any, self._engine), site.draft, clock)

    def ask(self, round_s: float, pass_s: float, line: int) -> None:
        """Notes what a session asks for in this step: every `round_s` seconds, `line` tokens."""
        self._asks.append((round_s, pass_s, line))

    def run(self, step_s: float) -> None:
        """Runs for a step, after all sessions have asked."""
        asks, self._asks = self._asks, []
        num = len(asks)
        self.step_s, self.hit_rate = self._duration_s(max(1, num)), self._measured.hit_rate
        if num:
            self._count(asks, num, step_s)
        counts = self._counts
        self._engine.load = DraftLoad(
            num_active_sessions=len(self.sessions),
            model_time_s=counts["model_time_s"],
            shared_time_s=counts["shared_time_s"],
            num_asked=int(counts["num_asked"]),
            num_late=int(counts["num_late"]),
        )

    def _count(self, asks: list[tuple[float, float, int]], num: int, step_s: float) -> None:
        rounds_per_s = sum(1 / round_s for round_s, _, _ in asks)
        steps_per_s = sum(self._num_steps(line) / round_s for round_s, _, line in asks) / num
        slack = 1 - steps_per_s * num * self._measured.draft_row_s
        wanting = min(1.0, steps_per_s * self._measured.draft_step_s / slack) if slack > 0 else 1.0
        busy = 1 - (1 - wanting) ** num
        together_s, alone_s = self._duration_s(wanting * num / busy), self._duration_s(1)
        if wanting == 1:
            self.hit_rate *= min(1.0, 1 / (steps_per_s * self.step_s))
        self._counts["model_time_s"] += busy * step_s
        self._counts["shared_time_s"] += busy * step_s * (1 - alone_s / together_s)
        self._counts["num_asked"] += rounds_per_s * step_s
        patience_s = self._patience_s + sum(pass_s for _, pass_s, _ in asks) / num
        if patience_s > 2 * alone_s:
            late = min(1.0, max(0.0, (2 * together_s - patience_s) / together_s))
            self._counts["num_late"] += (1 - self.hit_rate) * late * rounds_per_s * step_s

    def _num_steps(self, line: int) -> float:
        """Returns the steps of a round."""
        return max(line, self._lookahead_nodes / _NODES_A_STEP)

    def _duration_s(self, num_sessions: float) -> float:
        return self._measured.draft_step_s + num_sessions * self._measured.draft_row_s


@dataclass(slots=True)
class _Admission:
    """What `orchestrator.metrics` reads of an admission."""

    max_active: int
    num_active: int = 0
    num_queued: int = 0


class _Replicas:
    """What it reads of the workers."""

    def __init__(self, count: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        self._count = count

    def counts(self) -> Iterator[tuple[str, int, int]]:
        """Yields role, number in rotation and number out of it."""
        for role, (num_in, num_out) in self._count().items():
            yield role, num_in, num_out


class OrchestratorPod(Pod):
    """An orchestrator; requests beyond `max_active_requests` wait in it.

    Args:
        name: of the pod.
        ready_s: when it will have started.
        site: what is deployed.
        count: gives the workers of each role, in rotation and out of it.
    """

    def __init__(
        self, name: str, ready_s: float, site: Deployed, count: Callable[[], Mapping[str, tuple[int, int]]]
    ) -> None:
        settings = site.orchestrator
        super().__init__(name, ready_s, settings.max_active_requests + settings.max_queued_requests)
        self._admission = _Admission(settings.max_active_requests)
        OrchestratorMetrics(self.registry).watch(cast(Any, self._admission), cast(Any, _Replicas(count)))

    def admits(self, session: Session) -> bool:
        """Returns whether the turn of a request that it has has come."""
        num = self._admission.max_active
        return len(self.sessions) <= num or session in islice(self.sessions, num)

    def run(self) -> None:
        """Sets what metrics read."""
        self._admission.num_active = min(len(self.sessions), self._admission.max_active)
        self._admission.num_queued = len(self.sessions) - self._admission.num_active
