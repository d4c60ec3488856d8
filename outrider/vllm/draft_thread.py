"""The streams to the drafts, in an event loop of a thread beside vLLM's: it opens, feeds and ends sessions on drafts.

vLLM's thread posts commands once a step, without waiting; what arrives is handed over in the thread of the streams. A
request whose draft fails goes on without one, and gets another one later.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

from outrider import wire
from outrider.discovery.cluster import Cluster
from outrider.errors import InvalidArgument, OutriderError, Overloaded
from outrider.parameters import AcceptanceRule
from outrider.serving.unexpected import UnexpectedErrors
from outrider.tokens import ProposalPart, TokenSpan
from outrider.v1 import draft_pb2, tokens_pb2
from outrider.vllm.settings import DraftingSettings
from outrider.workers.breaker import Breaker
from outrider.workers.draft_session import DraftSession, SpeculationChoice
from outrider.workers.links import DRAFT, WorkerLink
from outrider.workers.pool import LinkPool
from outrider.workers.rotation import fits, leaving, load_of

_LOG: Final = logging.getLogger(__name__)
_END_S: Final = 5.0
_LAST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Begin:
    """Draft for a request."""

    request_id: str
    message: draft_pb2.DraftOpen
    token_ids: tuple[int, ...]
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class Advance:
    """A request has more tokens; request a proposal after them."""

    request_id: str
    token_ids: tuple[int, ...]
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """A request has ended."""

    request_id: str


Command: TypeAlias = Begin | Advance | End


@dataclass(slots=True, eq=False)
class _Session:
    """A request, and its session on a draft."""

    message: draft_pb2.DraftOpen
    token_ids: list[int]
    num_speculative_tokens: int
    draft: DraftSession | None = None
    retry: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class ThreadCounts:
    """Counts since the start, written by the thread and read by any."""

    num_lost: int = 0
    num_refused_parts: int = 0


class DraftThread:
    """Sessions on drafts for the requests of one vLLM engine.

    Args:
        settings: where the drafts are, and how long they may take.
        vocabulary_size: of the target: token ids from it on are refused.
        fingerprint: of the target's tokenizer; empty where it is not known, then every draft fits.

    Attributes:
        deliver: called in the thread with a request's id and each part of its proposal; must not block for long.
        ready: ids of the requests whose draft has opened their session; read by any thread.
        counts: see there.
    """

    def __init__(self, settings: DraftingSettings, vocabulary_size: int, fingerprint: str) -> None:
        self.deliver: Callable[[str, ProposalPart], None] = lambda request_id, part: None
        self.ready: set[str] = set()
        self.counts = ThreadCounts()
        self._settings = settings
        self._vocabulary_size = vocabulary_size
        self._fingerprint = fingerprint
        self._sessions: dict[str, _Session] = {}
        self._breakers: WeakKeyDictionary[WorkerLink, Breaker] = WeakKeyDictionary()
        self._warned: set[tuple[str, str]] = set()
        self._unexpected = UnexpectedErrors()
        self._pool: LinkPool | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-drafts", daemon=True)

    @property
    def num_connected(self) -> int:
        """Drafts in rotation. From any thread."""
        return 0 if self._pool is None else sum(self._is_in_rotation(link) for link in self._pool.links)

    def start(self) -> None:
        """Start the thread and connect. Raises `InvalidArgument` where a draft's place cannot be used."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def post(self, commands: Sequence[Command]) -> None:
        """Apply commands, in order, without waiting. From any thread."""
        if commands:
            self._loop.call_soon_threadsafe(self._apply, commands)

    def close(self) -> None:
        """End the streams and the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        self._loop.close()

    # The event loop calls the following methods.

    async def _start(self) -> None:
        self._pool = LinkPool(DRAFT, self._settings.drafts, "drafts", self._settings, Cluster(None))
        await self._pool.start()

    async def _stop(self) -> None:
        for request_id in list(self._sessions):
            self._end(request_id)
        if self._pool is not None:
            await self._pool.stop()
        # What is left belongs to calls that have ended, such as gRPC's own tasks.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=_LAST_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            try:
                self._apply_one(command)
            except Exception as error:
                # One request that cannot be drafted for must not cost the others their drafts.
                self._unexpected.log("a request could not be drafted for", error, request=command.request_id)
                self._end(command.request_id)

    def _apply_one(self, command: Command) -> None:
        match command:
            case Begin(request_id, message, token_ids, num_speculative_tokens):
                self._sessions[request_id] = _Session(message, list(token_ids), num_speculative_tokens)
                self._connect(request_id)
            case Advance(request_id, token_ids, num_speculative_tokens):
                if (session := self._sessions.get(request_id)) is not None:
                    start = len(session.token_ids)
                    session.token_ids.extend(token_ids)
                    session.num_speculative_tokens = num_speculative_tokens
                    if session.draft is not None:
                        lookahead = self._settings.lookahead if num_speculative_tokens else 0
                        session.draft.advance(TokenSpan(start, token_ids), num_speculative_tokens, lookahead)
            case End(request_id):
                self._end(request_id)

    def _connect(self, request_id: str) -> None:
        """Open a request's session on a draft; where there is none now, try again later."""
        session = self._sessions.get(request_id)
        if session is None or session.draft is not None:
            return
        session.retry = None
        link = self._chosen()
        if link is None:
            self._retry(request_id, session)
            return
        num, lookahead = session.num_speculative_tokens, self._settings.lookahead
        # vLLM verifies chains: branches are of use only where they are drafted ahead of its tokens.
        choice = SpeculationChoice(num, max_nodes=0 if lookahead else num, lookahead=lookahead)

        async def tokens_from(start: int) -> tuple[int, ...]:
            return tuple(session.token_ids[start:])

        def on_ready() -> None:
            self.ready.add(request_id)

        def on_lost(draft: DraftSession, error: OutriderError) -> None:
            self._lose(request_id, draft, error)

        def on_proposal(proposal: tokens_pb2.Proposal) -> None:
            self._receive(request_id, link, proposal)

        draft = DraftSession(link, choice, on_proposal, on_ready, on_lost, lambda layers, start: None, tokens_from)
        self._breaker(link).enter()
        session.draft = draft
        draft.open(session.message, len(session.token_ids))

    def _receive(self, request_id: str, link: WorkerLink, proposal: tokens_pb2.Proposal) -> None:
        """Hand a part of a proposal over; one that is invalid ends the session on its draft."""
        session = self._sessions.get(request_id)
        if session is None or session.draft is None:
            return
        try:
            part = wire.proposal_from_message(proposal)
            largest = max((node.token_id for node in part.nodes), default=0)
            if largest >= self._vocabulary_size:
                raise InvalidArgument(f"has token id {largest}, the vocabulary has {self._vocabulary_size}", "proposal")
        except InvalidArgument as error:
            self.counts.num_refused_parts += 1
            draft = session.draft
            draft.close()
            self._lose(request_id, draft, error)
            return
        if part.nodes:
            self._breaker(link).succeed()
        self.deliver(request_id, part)

    def _lose(self, request_id: str, draft: DraftSession, error: OutriderError) -> None:
        self.ready.discard(request_id)
        session = self._sessions.get(request_id)
        if session is None or session.draft is not draft:
            return
        self.counts.num_lost += 1
        self._warn(draft.link, error.message)
        # A full draft has not failed.
        if not isinstance(error, Overloaded):
            self._breaker(draft.link).fail()
        session.draft = None
        self._retry(request_id, session)

    def _retry(self, request_id: str, session: _Session) -> None:
        session.retry = self._loop.call_later(self._settings.draft_retry_s, self._connect, request_id)

    def _end(self, request_id: str) -> None:
        self.ready.discard(request_id)
        session = self._sessions.pop(request_id, None)
        if session is None:
            return
        if session.retry is not None:
            session.retry.cancel()
        if session.draft is not None:
            session.draft.close()

    def _chosen(self) -> WorkerLink | None:
        links = [] if self._pool is None else self._pool.links
        permitted = [link for link in links if self._is_in_rotation(link) and self._breaker(link).permits]
        return min(permitted, key=load_of, default=None)

    def _is_in_rotation(self, link: WorkerLink) -> bool:
        if not link.is_up or link.info is None or leaving(link):
            return False
        own = link.info.tokenizer_fingerprint
        if own and self._fingerprint and own != self._fingerprint:
            self._warn(link, f"its tokenizer {own} is not vLLM's {self._fingerprint}: it is not used")
            return False
        if link.info.feature_layers:
            self._warn(link, f"its drafter {link.info.drafter} needs features of the target, which vLLM does not give")
            return False
        return fits(link, "", AcceptanceRule.COUPLED)

    def _breaker(self, link: WorkerLink) -> Breaker:
        return self._breakers.setdefault(link, Breaker(self._settings.draft_retry_s))

    def _warn(self, link: WorkerLink, problem: str) -> None:
        """Log a problem of a draft once."""
        if (key := (link.address, problem)) not in self._warned and len(self._warned) < 1000:
            self._warned.add(key)
            _LOG.warning("outrider: draft %s: %s", link.address, problem)
