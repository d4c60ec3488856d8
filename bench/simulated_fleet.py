"""A simulated fleet: its pods come and go as they are told, and its clients ask as Outrider's services let them.

Sessions go where the services would send them: requests to the orchestrator with the fewest, from there to the target
that has their KV cache, else to the one with the fewest sessions, and to the draft with the fewest. Whom no target has
a place for waits at its orchestrator.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from bench.deployed import DRAFT, ORCHESTRATOR, SERVICES, TARGET, Deployed
from bench.hpa import SeenPod
from bench.scrapes import Scrapes
from bench.simulated_pods import DraftPod, OrchestratorPod, Pod, Session
from bench.simulated_target import TargetPod
from outrider.planning import Measurements

_HAND_OVER_SHARE: Final = {TARGET: 0.5, DRAFT: 0.5, ORCHESTRATOR: 1.0}
"""Of the drain budget: what has not ended by then goes on elsewhere; as the services' `__main__` modules have it."""
_GOLDEN: Final = 0.6180339887
"""Multiples of it, without their whole parts, are spread evenly: so are the scrapes of pods."""

_PodT = TypeVar("_PodT", bound=Pod)


@dataclass(frozen=True, slots=True)
class Work:
    """What clients ask.

    Attributes:
        prompt_len: tokens of a turn's prompt, on average; from half to half as much again.
        num_tokens: output tokens of a turn, likewise.
        turns: requests of a conversation, each with what went before as its context; then a new one begins.
        first_token_s: seconds until the first token, beyond which it was late.
        kv_token_bytes: KV cache of a token.
        seed: of all that is drawn.
    """

    prompt_len: int
    num_tokens: int
    turns: int
    first_token_s: float
    kv_token_bytes: int
    seed: int


class Fleet:
    """All pods and all clients.

    Args:
        site: what is deployed.
        measured: times of the models.
        work: what clients ask.
        startup_s: of each service, seconds from a pod's begin until it is ready.

    Attributes:
        now: seconds since the begin.
        clients: those that ask.
        num_wanted: clients that there should be; those too many leave when their request ends.
        first_tokens_s: what requests waited for their first tokens, since this was last emptied.
        num_waiting: requests for which no target has a place.
        num_unavailable: requests that failed because no target had a place in time; their clients asked again.
        pod_s: of each service, seconds of all its pods together.
    """

    def __init__(self, site: Deployed, measured: Measurements, work: Work, startup_s: dict[str, float]) -> None:
        self._site = site
        self._measured = measured
        self._work = work
        self._startup_s = startup_s
        self._random = random.Random(work.seed)
        self._num_made = 0
        self.now = 0.0
        names = [name for scaler in site.scalers.values() for name in scaler.targets]
        self._scrapes = Scrapes(names, site.scrape_s, site.average_s, lambda: self.now)
        self._targets: list[TargetPod] = []
        self._drafts: list[DraftPod] = []
        self._orchestrators: list[OrchestratorPod] = []
        self.clients: dict[Session, None] = {}
        self._lacking: dict[Session, None] = {}
        self.num_wanted = 0
        self.first_tokens_s: list[float] = []
        self.num_waiting = 0
        self.num_unavailable = 0
        self.pod_s: defaultdict[str, float] = defaultdict(float)
        for service in SERVICES:
            self.scale(service, site.scalers[service].least)
            for pod in self.pods(service):
                pod.ready_s = 0.0
        self._come_and_go()

    def pods(self, service: str) -> Sequence[Pod]:
        """Returns a service's pods in the order in which they were made, those that are going too."""
        found: dict[str, Sequence[Pod]] = {
            TARGET: self._targets,
            DRAFT: self._drafts,
            ORCHESTRATOR: self._orchestrators,
        }
        return found[service]

    def seen(self, service: str) -> list[SeenPod]:
        """Returns a service's pods as its autoscaler sees them, their metrics through Prometheus and its adapter."""
        return [SeenPod(pod.phase, self._scrapes.values(pod.name)) for pod in self.pods(service)]

    def scale(self, service: str, num: int) -> None:
        """Has a service have so many pods from now on; those that are not ready go first, then the newest."""
        kept = [pod for pod in self.pods(service) if pod.hand_over_s is None]
        for _ in range(len(kept), num):
            self._make(service)
        going = sorted(reversed(kept), key=lambda pod: (pod.is_ready, -pod.ready_s))[: max(0, len(kept) - num)]
        settings = {TARGET: self._site.target, DRAFT: self._site.draft, ORCHESTRATOR: self._site.orchestrator}[service]
        patience_s = _HAND_OVER_SHARE[service] * settings.drain_budget_s
        for pod in going:
            pod.hand_over_s = self.now + self._site.pre_stop_s[service] + patience_s

    def run(self, step_s: float) -> None:
        """Lets a step pass."""
        self._come_and_go()
        while len(self.clients) < self.num_wanted:
            client = Session()
            self.clients[client] = self._lacking[client] = None
            self._ask(client, self.now)
        self._assign()
        for target in self._targets:
            for session, ended_s in target.run(self.now, step_s):
                session.decoding_s += ended_s - self.now
                self._end(session, ended_s)
        # Those that ended ask again at once.
        self._assign()
        self.num_waiting = sum(client.target is None for client in self._lacking)
        for draft in self._drafts:
            draft.run(step_s)
        for orchestrator in self._orchestrators:
            orchestrator.run()
        for service in SERVICES:
            self.pod_s[service] += step_s * len(self.pods(service))
        self.now += step_s
        for client in self.clients:
            self._watch(client, step_s)
        self._scrapes.run()

    def _make(self, service: str) -> None:
        self._num_made += 1
        name, ready_s = f"{service}-{self._num_made}", self.now + self._startup_s[service]
        if service == TARGET:
            pod = TargetPod(name, ready_s, self._site, self._measured, self._work.kv_token_bytes)
            self._targets.append(pod)
        elif service == DRAFT:
            self._drafts.append(DraftPod(name, ready_s, self._site, self._measured, lambda: self.now))
        else:
            self._orchestrators.append(OrchestratorPod(name, ready_s, self._site, self._counts))

    def _counts(self) -> dict[str, tuple[int, int]]:
        """Returns the workers in rotation and out of it, by role."""
        found = {}
        for service in (TARGET, DRAFT):
            num_in = sum(pod.is_in_rotation for pod in self.pods(service))
            found[service] = (num_in, len(self.pods(service)) - num_in)
        return found

    def _come_and_go(self) -> None:
        """Has pods become ready that have started, and end that have nothing left or no time left."""
        self._targets = [pod for pod in self._targets if self._goes_on(pod)]
        self._drafts = [pod for pod in self._drafts if self._goes_on(pod)]
        self._orchestrators = [pod for pod in self._orchestrators if self._goes_on(pod)]

    def _goes_on(self, pod: Pod) -> bool:
        if pod.hand_over_s is None:
            if not pod.is_ready and pod.ready_s <= self.now:
                pod.is_ready = True
                self._scrapes.add(pod.name, pod.registry, _GOLDEN * int(pod.name.rpartition("-")[2]))
            return True
        if pod.sessions and self.now < pod.hand_over_s:
            return True
        for session in list(pod.sessions):
            self._leave(session, pod)
        self._scrapes.remove(pod.name)
        return False

    def _ask(self, session: Session, now: float) -> None:
        """Has a client ask: the next turn of its conversation, or a new one."""
        if session.num_turns:
            session.num_turns -= 1
        else:
            session.context = session.cached = 0.0
            session.warm = None
            session.num_turns = self._work.turns - 1
        session.context += self._random.uniform(0.5, 1.5) * self._work.prompt_len
        session.remaining = self._random.uniform(0.5, 1.5) * self._work.num_tokens
        session.arrived_s = session.refused_s = now
        session.first_token_s = None

    def _assign(self) -> None:
        """Gives requests an orchestrator, and those whose turn has come a target and a draft, as far as there are."""
        for session in list(self._lacking):
            if session.orchestrator is None:
                session.orchestrator = _fewest(self._orchestrators)
                if session.orchestrator is None:
                    continue
                session.orchestrator.sessions[session] = None
            if session.target is None and session.orchestrator.admits(session):
                self._to_target(session)
            if session.draft is None and session.target is not None:
                session.draft = _fewest(self._drafts)
                if session.draft is not None:
                    session.draft.sessions[session] = None
            if session.target is not None and session.draft is not None:
                del self._lacking[session]

    def _to_target(self, session: Session) -> None:
        warm = session.warm
        target = warm if warm is not None and warm.has_place else _fewest(self._targets)
        if target is None:
            if self.now - session.refused_s > self._site.orchestrator.failover_timeout_s:
                session.refused_s = self.now
                self.num_unavailable += 1
            return
        if target is not warm:
            session.cached = 0.0
        session.target = session.warm = target
        target.sessions[session] = None

    def _end(self, session: Session, now: float) -> None:
        """Ends a request; its client asks again, unless there are enough."""
        for pod in (session.orchestrator, session.target, session.draft):
            if pod is not None:
                self._leave(session, pod)
        if len(self.clients) > self.num_wanted:
            del self.clients[session]
            del self._lacking[session]
        else:
            self._ask(session, now)

    def _leave(self, session: Session, pod: Pod) -> None:
        del pod.sessions[session]
        self._lacking[session] = None
        match pod:
            case TargetPod():
                session.target = None
            case DraftPod():
                session.draft = None
            case OrchestratorPod():
                session.orchestrator = None

    def _watch(self, client: Session, step_s: float) -> None:
        """Notes what a client waits for, in the step that has just ended."""
        if client.first_token_s is None:
            client.was_late = client.was_late or self.now - client.arrived_s > self._work.first_token_s
            return
        if client.first_token_s <= self.now - step_s:
            client.decoding_s += step_s
            return
        # It decodes from the next step on.
        waited_s = client.first_token_s - client.arrived_s
        self.first_tokens_s.append(waited_s)
        client.was_late = client.was_late or waited_s > self._work.first_token_s


def _fewest(pods: Iterable[_PodT]) -> _PodT | None:
    """Returns the pod with the fewest sessions of those that have places; None where none has."""
    return min((pod for pod in pods if pod.has_place), key=lambda pod: len(pod.sessions), default=None)
