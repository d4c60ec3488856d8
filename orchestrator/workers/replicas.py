"""The replicas of targets and drafts: which are in rotation, and which one a session uses."""

import asyncio
import functools
from collections.abc import Iterable, Iterator
from typing import Final
from weakref import WeakKeyDictionary

from orchestrator.settings import OrchestratorSettings
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.workers.model import Model, TokenizerCache
from outrider.discovery.cluster import Cluster
from outrider.errors import Unavailable
from outrider.parameters import AcceptanceRule
from outrider.v1 import generation_pb2, tokens_pb2, worker_pb2
from outrider.workers.breaker import Breaker
from outrider.workers.links import DRAFT, TARGET, WorkerLink
from outrider.workers.pool import LinkPool
from outrider.workers.rotation import fits, is_ready, leaving, load_of, rules_of

_CHECK_INTERVAL_S: Final = 0.5
"""Seconds after which a request without a target checks the loads again, which polling changes."""


class Replicas:
    """Links to all targets and drafts.

    A target is in rotation while it is connected and hosts the same model as the first connected one; a draft, while it
    is connected and shares the target's tokenizer. The others are listed with the reason, and checked again when their
    stream is back. A draft that failed is out of rotation while its circuit is open; see `Breaker`.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self._cluster = Cluster(settings.kubeconfig)
        self._targets = LinkPool(TARGET, settings.targets, "targets", settings, self._cluster)
        self._drafts = LinkPool(DRAFT, settings.drafts, "drafts", settings, self._cluster)
        self._tokenizers = TokenizerCache()
        self._last_model: Model | None = None
        self._breakers: WeakKeyDictionary[WorkerLink, Breaker] = WeakKeyDictionary()

    @property
    def targets(self) -> list[WorkerLink]:
        """All targets, in rotation or not."""
        return self._targets.links

    @property
    def drafts(self) -> list[WorkerLink]:
        """All drafts, in rotation or not."""
        return self._drafts.links

    async def start(self) -> None:
        """Start discovery and connect. Raise `InvalidArgument` where discovery needs a cluster and there is none."""
        await self._targets.start()
        await self._drafts.start()

    async def stop(self) -> None:
        """Close all links."""
        self._tokenizers.close()
        await self._targets.stop()
        await self._drafts.stop()
        await self._cluster.close()

    def target_problem(self, link: WorkerLink) -> str:
        """Return the reason why a target is out of rotation; empty for one in rotation."""
        first = self._first_target()
        if not link.is_up or link.info is None:
            return link.problem
        if problem := leaving(link):
            return problem
        if first and first.info and link.info.model_fingerprint != first.info.model_fingerprint:
            return f"its model {link.info.model_fingerprint} is not {first.info.model_fingerprint}"
        return ""

    def draft_problem(self, link: WorkerLink) -> str:
        """Return the reason why a draft is out of rotation; empty for one in rotation."""
        first = self._first_target()
        if not link.is_up or link.info is None:
            return link.problem
        if problem := leaving(link):
            return problem
        own = link.info.tokenizer_fingerprint
        expected = first.info.tokenizer_fingerprint if first and first.info else ""
        if own and expected and own != expected:
            return f"FAILED_PRECONDITION: its tokenizer {own} is not the target's {expected}"
        if first and first.info and (problem := _feature_problem(link.info, first.info)):
            return f"FAILED_PRECONDITION: {problem}"
        if self._breaker(link).is_open:
            return "circuit open"
        return ""

    def record_failure(self, draft: WorkerLink) -> None:
        """Open the circuit of a draft; the time for which it is open grows from failure to failure."""
        self._breaker(draft).fail()

    def record_success(self, draft: WorkerLink) -> None:
        """Close the circuit of a draft that proposes."""
        self._breaker(draft).succeed()

    async def target(self, warm: str, avoided: Iterable[str] = ()) -> WorkerLink:
        """Return the target for a session; wait for one within the failover bound.

        Args:
            warm: replica that had the session last; chosen where it is in rotation.
            avoided: addresses that just failed; chosen only where there is no other.

        Raises:
            Unavailable: none came into rotation in time.
        """
        return _preferred(await self._targets_in_rotation(), warm, set(avoided))

    async def model(self) -> Model:
        """Return the model of the targets, without choosing one; wait for one within the failover bound.

        Raises:
            Unavailable: none came into rotation in time, or none sends the tokenizer.
        """
        ready = sorted(await self._targets_in_rotation(), key=load_of)
        infos = [link.info for link in ready if link.info]
        info = infos[0]
        defaults = info.default_parameters if self._settings.generation_config == "auto" else None
        self._last_model = Model(
            name=info.model,
            fingerprint=info.model_fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            tokenizer=await self.tokenizer(ready[0]),
            vocabulary_size=info.vocabulary_size,
            max_session_len=min(known.max_session_len for known in infos),
            eos_token_ids=tuple(info.eos_token_ids),
            defaults=defaults or tokens_pb2.SamplingParameters(),
            rules=frozenset.intersection(*(rules_of(known) for known in infos)),
            default_rule=self._settings.acceptance_rule,
            takes_constraints=all(known.grammar_library for known in infos),
        )
        return self._last_model

    @property
    def past_model(self) -> Model | None:
        """The model of the last request that found a target, while none is in rotation; else None."""
        if self._last_model is None or any(not self.target_problem(link) for link in self.targets):
            return None
        return self._last_model

    async def _targets_in_rotation(self) -> list[WorkerLink]:
        """Return the targets in rotation, at least one; raise as `target` does."""
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
        """Return the least loaded draft in rotation that fits the request; None where there is none.

        A draft that failed before is tried by a single session, whose outcome closes or opens the circuit.

        Args:
            drafter: the required drafter, which one that combines it with another is where there is no other; empty
                for any.
            rule: the acceptance rule of the request.
        """
        ready = [link for link in self.drafts if not self.draft_problem(link) and fits(link, drafter, rule)]
        permitted = [link for link in ready if self._breaker(link).permits]
        exact = [link for link in permitted if link.info is not None and link.info.drafter == drafter]
        chosen = min(exact or permitted, key=load_of, default=None)
        if chosen is not None:
            self._breaker(chosen).enter()
        return chosen

    async def tokenizer(self, link: WorkerLink) -> Tokenizer | None:
        """Return a target's tokenizer, which is fetched once; None where its model has none.

        Raises:
            Unavailable: neither this target nor two others with the same tokenizer send it.
        """
        fingerprint = link.info.tokenizer_fingerprint if link.info else ""
        return await self._tokenizers.get(fingerprint, functools.partial(self._sources, fingerprint, link))

    def _sources(self, fingerprint: str, first: WorkerLink) -> list[WorkerLink]:
        """Return a target, and the others in rotation that have the same tokenizer."""
        others = [link for link in self.targets if link is not first and not self.target_problem(link)]
        return [first, *(link for link in others if link.info and link.info.tokenizer_fingerprint == fingerprint)]

    def forget_session(self, worker_key: str) -> None:
        """Send `ForgetSession` for a deleted session to all workers, without waiting.

        Any of them may have run it; the others ignore the frame. A worker without a stream does not get it later: it
        forgets the session once that has been idle for long enough.
        """
        for link in (*self.targets, *self.drafts):
            link.send(link.kind.frame(forget=tokens_pb2.ForgetSession(session_id=worker_key)))

    def statuses(self) -> list[generation_pb2.WorkerStatus]:
        """Return every worker as `ListModels` shows it."""
        known = [(link, self.target_problem(link)) for link in self.targets]
        known += [(link, self.draft_problem(link)) for link in self.drafts]
        return [
            generation_pb2.WorkerStatus(address=link.address, info=link.info, in_rotation=not problem, reason=problem)
            for link, problem in known
        ]

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache of all targets in rotation that sessions hold, as last polled; 1 without a target.

        A target that reports no budget counts as empty.
        """
        ready = [link for link in self.targets if not self.target_problem(link)]
        budget_bytes = sum(link.info.kv_budget_bytes for link in ready if link.info)
        if not ready:
            return 1.0
        return sum(link.load.kv_used_bytes for link in ready) / budget_bytes if budget_bytes else 0.0

    def counts(self) -> Iterator[tuple[str, int, int]]:
        """Yield each role, its number of workers in rotation and its number out of rotation."""
        for role, links, problem in (
            ("target", self.targets, self.target_problem),
            ("draft", self.drafts, self.draft_problem),
        ):
            num_out = sum(bool(problem(link)) for link in links)
            yield role, len(links) - num_out, num_out

    def _breaker(self, draft: WorkerLink) -> Breaker:
        return self._breakers.setdefault(draft, Breaker(self._settings.draft_retry_s))

    def _first_target(self) -> WorkerLink | None:
        """Return the target whose model the others must host; one that is leaving only where all are leaving."""
        known = [link for link in self.targets if link.is_up and link.info]
        return next((link for link in known if not leaving(link)), known[0] if known else None)

    @staticmethod
    async def _change(pool: LinkPool) -> None:
        """Return when a link was added to the pool, or when the stream of one opened or broke."""
        changes = [pool.changed, *(link.changed for link in pool.links)]
        for change in changes:
            change.clear()
        waits = [asyncio.create_task(change.wait()) for change in changes]
        try:
            # Loads and draining are polled, and set no event.
            async with asyncio.timeout(_CHECK_INTERVAL_S):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            for wait in waits:
                wait.cancel()


def _feature_problem(draft: worker_pb2.GetInfoResponse, target: worker_pb2.GetInfoResponse) -> str:
    """Return the reason why a draft cannot use this target's features; empty where it can, or needs none."""
    if draft.target_fingerprint and draft.target_fingerprint != target.weights_fingerprint:
        return f"it was made for target {draft.target_fingerprint}, not for {target.weights_fingerprint}"
    if not draft.feature_layers:
        return ""
    if draft.hidden_size != target.hidden_size:
        return f"it takes features of {draft.hidden_size} numbers, the target's have {target.hidden_size}"
    if max(draft.feature_layers) > target.num_layers:
        return f"it needs layer {max(draft.feature_layers)}, the target has {target.num_layers}"
    return ""


def _preferred(ready: list[WorkerLink], warm: str, avoided: set[str]) -> WorkerLink:
    fresh = [link for link in ready if link.address not in avoided] or ready
    for link in fresh:
        if warm and link.info and link.info.replica == warm and is_ready(link):
            return link
    return min(fresh, key=load_of)
