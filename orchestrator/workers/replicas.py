"""The workers, which of them are in rotation, and which one a session gets."""

import asyncio
import functools
from collections.abc import Iterable, Iterator
from typing import Final
from weakref import WeakKeyDictionary

from orchestrator.discovery.cluster import Cluster
from orchestrator.settings import OrchestratorSettings
from orchestrator.text.tokenizer import Tokenizer, fetch_tokenizer
from orchestrator.workers.breaker import Breaker
from orchestrator.workers.links import DRAFT, TARGET, WorkerLink
from orchestrator.workers.model import Model
from orchestrator.workers.pool import LinkPool
from outrider.errors import Unavailable
from outrider.parameters import AcceptanceRule
from outrider.v1 import generation_pb2, tokens_pb2, worker_pb2

_LOOK_S: Final = 0.5
_MAX_FETCHES: Final = 3
"""Targets that are asked for a tokenizer, one after the other, while requests wait."""


class Replicas:
    """Links to all targets and drafts.

    A target is in rotation when it is reached and hosts the same model as the first one reached; a draft, when it is
    reached and shares the target's tokenizer. Whoever is not is listed with the reason, and looked at again when its
    stream comes back. A draft that failed rests first; see `Breaker`.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self._cluster = Cluster(settings.kubeconfig)
        self._targets = LinkPool(TARGET, settings.targets, "targets", settings, self._cluster)
        self._drafts = LinkPool(DRAFT, settings.drafts, "drafts", settings, self._cluster)
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._fetches: dict[str, asyncio.Task[Tokenizer | None]] = {}
        self._last_model: Model | None = None
        self._breakers: WeakKeyDictionary[WorkerLink, Breaker] = WeakKeyDictionary()

    @property
    def targets(self) -> list[WorkerLink]:
        """All targets that are known now, in rotation or not."""
        return self._targets.links

    @property
    def drafts(self) -> list[WorkerLink]:
        """All drafts that are known now, in rotation or not."""
        return self._drafts.links

    async def start(self) -> None:
        """Begins to look for workers and to connect. Raises `InvalidArgument` where there is no cluster to ask."""
        await self._targets.start()
        await self._drafts.start()

    async def stop(self) -> None:
        """Ends all links."""
        for fetch in tuple(self._fetches.values()):
            fetch.cancel()
        await self._targets.stop()
        await self._drafts.stop()
        await self._cluster.close()

    def target_problem(self, link: WorkerLink) -> str:
        """Returns why a target is out of rotation; empty when it is in."""
        first = self._first_target()
        if not link.is_up or link.info is None:
            return link.problem
        if problem := _leaving(link):
            return problem
        if first and first.info and link.info.model_fingerprint != first.info.model_fingerprint:
            return f"its model {link.info.model_fingerprint} is not {first.info.model_fingerprint}"
        return ""

    def draft_problem(self, link: WorkerLink) -> str:
        """Returns why a draft is out of rotation; empty when it is in."""
        first = self._first_target()
        if not link.is_up or link.info is None:
            return link.problem
        if problem := _leaving(link):
            return problem
        own = link.info.tokenizer_fingerprint
        expected = first.info.tokenizer_fingerprint if first and first.info else ""
        if own and expected and own != expected:
            return f"FAILED_PRECONDITION: its tokenizer {own} is not the target's {expected}"
        if first and first.info and (problem := _feature_problem(link.info, first.info)):
            return f"FAILED_PRECONDITION: {problem}"
        if self._breaker(link).is_open:
            return "it failed and rests"
        return ""

    def failed(self, draft: WorkerLink) -> None:
        """Keeps a draft that failed out of rotation for a while, which grows from failure to failure."""
        self._breaker(draft).fail()

    def proved(self, draft: WorkerLink) -> None:
        """Notes that a draft proposes: earlier failures are forgotten."""
        self._breaker(draft).succeed()

    async def target(self, warm: str, avoided: Iterable[str] = ()) -> WorkerLink:
        """Returns the target for a session, waiting for one within the failover bound.

        Args:
            warm: replica that had the session last; taken when it is in rotation.
            avoided: addresses that just failed; taken only when there is no other.

        Raises:
            Unavailable: none came into rotation in time.
        """
        return _preferred(await self._targets_in_rotation(), warm, set(avoided))

    async def model(self) -> Model:
        """Returns the model of the targets, waiting for one within the failover bound; chooses none of them.

        Raises:
            Unavailable: none came into rotation in time, or none sends the tokenizer.
        """
        ready = sorted(await self._targets_in_rotation(), key=_load)
        infos = [link.info for link in ready if link.info]
        info = infos[0]
        self._last_model = Model(
            fingerprint=info.model_fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            tokenizer=await self.tokenizer(ready[0]),
            vocabulary_size=info.vocabulary_size,
            max_session_len=min(known.max_session_len for known in infos),
            eos_token_ids=tuple(info.eos_token_ids),
        )
        return self._last_model

    @property
    def past_model(self) -> Model | None:
        """The model of the last request that found a target; None where one is in rotation, or no request has."""
        if self._last_model is None or any(not self.target_problem(link) for link in self.targets):
            return None
        return self._last_model

    async def _targets_in_rotation(self) -> list[WorkerLink]:
        """Returns the targets in rotation, at least one; raises as `target` does."""
        try:
            async with asyncio.timeout(self._settings.failover_timeout_s):
                while True:
                    if ready := [link for link in self.targets if not self.target_problem(link)]:
                        return ready
                    if self._targets.is_empty:
                        raise TimeoutError
                    await self._change(self._targets)
        except TimeoutError:
            none = "none is configured" if self._targets.is_empty else "none was found"
            problems = "; ".join(f"{link.address}: {self.target_problem(link)}" for link in self.targets)
            raise Unavailable(f"no target is available ({problems or none})") from None

    def draft(self, drafter: str, rule: AcceptanceRule) -> WorkerLink | None:
        """Returns the least loaded draft in rotation that suits the request; None where there is none.

        One that failed before is given to a single session, whose luck decides about the others.

        Args:
            drafter: the drafter it must be; empty for any.
            rule: the rule that will judge its proposals.
        """
        ready = [link for link in self.drafts if not self.draft_problem(link) and _suits(link, drafter, rule)]
        permitted = [link for link in ready if self._breaker(link).permits]
        chosen = min(permitted, key=_load, default=None)
        if chosen is not None:
            self._breaker(chosen).enter()
        return chosen

    async def tokenizer(self, link: WorkerLink) -> Tokenizer | None:
        """Returns a target's tokenizer, fetched once, for all who wait for it; None where its model has none.

        Raises:
            Unavailable: neither this target nor another one with the same tokenizer sends it.
        """
        fingerprint = link.info.tokenizer_fingerprint if link.info else ""
        if fingerprint in self._tokenizers:
            return self._tokenizers[fingerprint]
        fetch = self._fetches.get(fingerprint)
        if fetch is None:
            fetch = self._fetches[fingerprint] = asyncio.create_task(self._fetch(fingerprint, link))
            fetch.add_done_callback(functools.partial(self._forget_fetch, fingerprint))
        # One caller that gives up takes it from nobody else.
        return await asyncio.shield(fetch)

    async def _fetch(self, fingerprint: str, first: WorkerLink) -> Tokenizer | None:
        others = [link for link in self.targets if link is not first and not self.target_problem(link)]
        links = [first, *(link for link in others if link.info and link.info.tokenizer_fingerprint == fingerprint)]
        problem = Unavailable("no target sends its tokenizer")
        for link in links[:_MAX_FETCHES]:
            try:
                tokenizer = self._tokenizers[fingerprint] = await fetch_tokenizer(link.channel)
                return tokenizer
            except Unavailable as error:
                problem = error
        raise problem

    def _forget_fetch(self, fingerprint: str, fetch: "asyncio.Task[Tokenizer | None]") -> None:
        del self._fetches[fingerprint]
        # Looked at, as nobody may be left who waits for it.
        if not fetch.cancelled():
            fetch.exception()

    def forget_session(self, worker_key: str) -> None:
        """Has the workers forget a session that is gone; does not wait for them.

        All are told, since any may have run it, and those that have not ignore it. One without a stream now is not told
        later: it forgets the session by itself once that has been idle for long enough.
        """
        for link in (*self.targets, *self.drafts):
            link.send(link.kind.frame(forget=tokens_pb2.ForgetSession(session_id=worker_key)))

    def statuses(self) -> list[generation_pb2.WorkerStatus]:
        """Returns every worker as `ListModels` shows it."""
        known = [(link, self.target_problem(link)) for link in self.targets]
        known += [(link, self.draft_problem(link)) for link in self.drafts]
        return [
            generation_pb2.WorkerStatus(address=link.address, info=link.info, in_rotation=not problem, reason=problem)
            for link, problem in known
        ]

    def counts(self) -> Iterator[tuple[str, int, int]]:
        """Yields role, number in rotation and number out of it."""
        for role, links, problem in (
            ("target", self.targets, self.target_problem),
            ("draft", self.drafts, self.draft_problem),
        ):
            num_out = sum(bool(problem(link)) for link in links)
            yield role, len(links) - num_out, num_out

    def _breaker(self, draft: WorkerLink) -> Breaker:
        return self._breakers.setdefault(draft, Breaker(self._settings.draft_retry_s))

    def _first_target(self) -> WorkerLink | None:
        """Returns the target that the others must fit; one that leaves decides for nobody but where all do."""
        known = [link for link in self.targets if link.is_up and link.info]
        return next((link for link in known if not _leaving(link)), known[0] if known else None)

    @staticmethod
    async def _change(pool: LinkPool) -> None:
        """Returns when a link of the pool came, or the stream of one came or went."""
        changes = [pool.changed, *(link.changed for link in pool.links)]
        for change in changes:
            change.clear()
        waits = [asyncio.create_task(change.wait()) for change in changes]
        try:
            # Load and draining are polled, so that a change of theirs is noticed too.
            async with asyncio.timeout(_LOOK_S):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            for wait in waits:
                wait.cancel()


def _leaving(link: WorkerLink) -> str:
    """Returns why a worker that is reached should get no new sessions; empty where it should."""
    if link.load.draining:
        return "it is draining"
    # Once: metrics are read in another thread.
    endpoint = link.endpoint
    if endpoint is None:
        return "it is no longer listed"
    return "it is terminating" if endpoint.is_terminating else ""


def _feature_problem(draft: worker_pb2.GetInfoResponse, target: worker_pb2.GetInfoResponse) -> str:
    """Returns why a draft cannot be made of this target's features; empty where it can, or needs none."""
    if draft.target_fingerprint and draft.target_fingerprint != target.weights_fingerprint:
        return f"it was made for target {draft.target_fingerprint}, not for {target.weights_fingerprint}"
    if not draft.feature_layers:
        return ""
    if draft.hidden_size != target.hidden_size:
        return f"it takes features of {draft.hidden_size} numbers, the target's have {target.hidden_size}"
    if max(draft.feature_layers) > target.num_layers:
        return f"it asks for layer {max(draft.feature_layers)}, the target has {target.num_layers}"
    return ""


def _suits(link: WorkerLink, drafter: str, rule: AcceptanceRule) -> bool:
    info = link.info
    if info is None or (drafter and info.drafter != drafter):
        return False
    return not info.acceptance_rules or rule.value in info.acceptance_rules


def _load(link: WorkerLink) -> tuple[bool, int, int]:
    # One that is not ready, as when it is full, is better than none.
    return not _is_ready(link), max(link.num_sessions, link.load.num_active_sessions), link.num_sessions


def _is_ready(link: WorkerLink) -> bool:
    endpoint = link.endpoint
    return endpoint is not None and endpoint.is_ready


def _preferred(ready: list[WorkerLink], warm: str, avoided: set[str]) -> WorkerLink:
    fresh = [link for link in ready if link.address not in avoided] or ready
    for link in fresh:
        if warm and link.info and link.info.replica == warm and _is_ready(link):
            return link
    return min(fresh, key=_load)
