"""The workers, which of them are in rotation, and which one a session gets."""

import asyncio
from collections.abc import Iterable
from typing import Final

from orchestrator.breaker import Breaker
from orchestrator.links import DRAFT, TARGET, WorkerLink
from orchestrator.settings import OrchestratorSettings
from orchestrator.tokenizer import Tokenizer, fetch_tokenizer
from outrider.errors import Unavailable
from outrider.parameters import AcceptanceRule
from outrider.v1 import generation_pb2, worker_pb2

_LOOK_S: Final = 0.5


class Replicas:
    """Links to all targets and drafts.

    A target is in rotation when it is reached and hosts the same model as the first one reached; a draft, when it is
    reached and shares the target's tokenizer. Whoever is not is listed with the reason, and looked at again when its
    stream comes back. A draft that failed rests first; see `Breaker`.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self.targets = [WorkerLink(address, TARGET, settings) for address in settings.targets]
        self.drafts = [WorkerLink(address, DRAFT, settings) for address in settings.drafts]
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._fetching = asyncio.Lock()
        self._breakers = {link.address: Breaker(settings.draft_retry_s) for link in self.drafts}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to connect."""
        self._tasks = [asyncio.create_task(link.run()) for link in (*self.targets, *self.drafts)]

    async def stop(self) -> None:
        """Ends all links."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def target_problem(self, link: WorkerLink) -> str:
        """Returns why a target is out of rotation; empty when it is in."""
        first = self._first_target()
        if not link.is_up or link.info is None:
            return link.problem
        if link.load.draining:
            return "it is draining"
        if first and first.info and link.info.model_fingerprint != first.info.model_fingerprint:
            return f"its model {link.info.model_fingerprint} is not {first.info.model_fingerprint}"
        return ""

    def draft_problem(self, link: WorkerLink) -> str:
        """Returns why a draft is out of rotation; empty when it is in."""
        first = self._first_target()
        if not link.is_up or link.info is None:
            return link.problem
        if link.load.draining:
            return "it is draining"
        own = link.info.tokenizer_fingerprint
        expected = first.info.tokenizer_fingerprint if first and first.info else ""
        if own and expected and own != expected:
            return f"FAILED_PRECONDITION: its tokenizer {own} is not the target's {expected}"
        if first and first.info and (problem := _feature_problem(link.info, first.info)):
            return f"FAILED_PRECONDITION: {problem}"
        if self._breakers[link.address].is_open:
            return "it failed and rests"
        return ""

    def failed(self, draft: WorkerLink) -> None:
        """Keeps a draft that failed out of rotation for a while, which grows from failure to failure."""
        self._breakers[draft.address].fail()

    def proved(self, draft: WorkerLink) -> None:
        """Notes that a draft proposes: earlier failures are forgotten."""
        self._breakers[draft.address].succeed()

    async def target(self, warm: str, avoided: Iterable[str] = ()) -> WorkerLink:
        """Returns the target for a session, waiting for one within the failover bound.

        Args:
            warm: replica that had the session last; taken when it is in rotation.
            avoided: addresses that just failed; taken only when there is no other.

        Raises:
            Unavailable: none came into rotation in time.
        """
        try:
            async with asyncio.timeout(self._settings.failover_timeout_s):
                while True:
                    ready = [link for link in self.targets if not self.target_problem(link)]
                    if ready:
                        return _preferred(ready, warm, set(avoided))
                    if not self.targets:
                        raise TimeoutError
                    await self._change(self.targets)
        except TimeoutError:
            problems = "; ".join(f"{link.address}: {self.target_problem(link)}" for link in self.targets)
            raise Unavailable(f"no target is available ({problems or 'none is configured'})") from None

    def draft(self, drafter: str, rule: AcceptanceRule) -> WorkerLink | None:
        """Returns the least loaded draft in rotation that suits the request; None where there is none.

        One that failed before is given to a single session, whose luck decides about the others.

        Args:
            drafter: the drafter it must be; empty for any.
            rule: the rule that will judge its proposals.
        """
        ready = [link for link in self.drafts if not self.draft_problem(link) and _suits(link, drafter, rule)]
        permitted = [link for link in ready if self._breakers[link.address].permits]
        chosen = min(permitted, key=_load, default=None)
        if chosen is not None:
            self._breakers[chosen.address].enter()
        return chosen

    async def tokenizer(self, link: WorkerLink) -> Tokenizer | None:
        """Returns a target's tokenizer, fetched once; None where its model has none. Raises `Unavailable`."""
        fingerprint = link.info.tokenizer_fingerprint if link.info else ""
        async with self._fetching:
            if fingerprint not in self._tokenizers:
                self._tokenizers[fingerprint] = await fetch_tokenizer(link.channel)
        return self._tokenizers[fingerprint]

    def statuses(self) -> list[generation_pb2.WorkerStatus]:
        """Returns every worker as `ListModels` shows it."""
        known = [(link, self.target_problem(link)) for link in self.targets]
        known += [(link, self.draft_problem(link)) for link in self.drafts]
        return [
            generation_pb2.WorkerStatus(address=link.address, info=link.info, in_rotation=not problem, reason=problem)
            for link, problem in known
        ]

    def _first_target(self) -> WorkerLink | None:
        return next((link for link in self.targets if link.is_up and link.info), None)

    @staticmethod
    async def _change(links: list[WorkerLink]) -> None:
        """Returns when the stream of one of the links came or went."""
        for link in links:
            link.changed.clear()
        waits = [asyncio.create_task(link.changed.wait()) for link in links]
        try:
            # Load and draining are polled, so that a change of theirs is noticed too.
            async with asyncio.timeout(_LOOK_S):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            for wait in waits:
                wait.cancel()


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


def _load(link: WorkerLink) -> tuple[int, int]:
    return max(link.num_sessions, link.load.num_active_sessions), link.num_sessions


def _preferred(ready: list[WorkerLink], warm: str, avoided: set[str]) -> WorkerLink:
    fresh = [link for link in ready if link.address not in avoided] or ready
    for link in fresh:
        if warm and link.info and link.info.replica == warm:
            return link
    return min(fresh, key=_load)
