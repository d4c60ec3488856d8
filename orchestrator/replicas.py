"""The workers, which of them are in rotation, and which one a session gets."""

import asyncio
from collections.abc import Iterable

from orchestrator.links import DRAFT, TARGET, WorkerLink
from orchestrator.settings import OrchestratorSettings
from orchestrator.tokenizer import Tokenizer, fetch_tokenizer
from outrider.errors import Unavailable
from outrider.v1 import generation_pb2


class Replicas:
    """Links to all targets and drafts.

    A target is in rotation when it is reached and hosts the same model as the first one reached; a draft, when it is
    reached and shares the target's tokenizer. Whoever is not is listed with the reason, and looked at again when its
    stream comes back, so a worker that returns is a circuit that closes by itself.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self.targets = [WorkerLink(address, TARGET, settings) for address in settings.targets]
        self.drafts = [WorkerLink(address, DRAFT, settings) for address in settings.drafts]
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._resting: dict[str, float] = {}
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
        if self._resting.get(link.address, 0) > asyncio.get_running_loop().time():
            return "it failed and rests"
        return ""

    def rest(self, link: WorkerLink) -> None:
        """Keeps a worker that failed out of rotation for a while."""
        self._resting[link.address] = asyncio.get_running_loop().time() + self._settings.draft_retry_s

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
                    await self._change(self.targets)
        except TimeoutError:
            problems = "; ".join(f"{link.address}: {self.target_problem(link)}" for link in self.targets)
            raise Unavailable(f"no target is available ({problems or 'none is configured'})") from None

    def draft(self, drafter: str) -> WorkerLink | None:
        """Returns the least loaded draft in rotation, of that drafter where one is named; None where there is none."""
        ready = [
            link
            for link in self.drafts
            if not self.draft_problem(link) and (not drafter or (link.info and link.info.drafter == drafter))
        ]
        return min(ready, key=_load, default=None)

    async def tokenizer(self, link: WorkerLink) -> Tokenizer | None:
        """Returns a target's tokenizer, fetched once; None where its model has none."""
        fingerprint = link.info.tokenizer_fingerprint if link.info else ""
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
            await asyncio.wait([*waits, asyncio.create_task(asyncio.sleep(0.5))], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _load(link: WorkerLink) -> tuple[int, int]:
    return max(link.num_sessions, link.load.num_active_sessions), link.num_sessions


def _preferred(ready: list[WorkerLink], warm: str, avoided: set[str]) -> WorkerLink:
    fresh = [link for link in ready if link.address not in avoided] or ready
    for link in fresh:
        if warm and link.info and link.info.replica == warm:
            return link
    return min(fresh, key=_load)
