"""The thread that drafts: every step brings each session that waits for a proposal one node further."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from draft_service.commands import (
    AdvanceSession,
    BeginDrain,
    CloseSession,
    Command,
    EndStream,
    Opened,
    OpenSession,
    ProposalPart,
    Refused,
    Reply,
    ReplyStream,
    Seat,
)
from draft_service.drafters.drafter import Branch, Drafter
from draft_service.inbox import Inbox
from draft_service.sessions import Session, Sessions
from outrider.errors import Draining, Fenced, OutriderError
from outrider.tokens import Base

_LOG: Final = logging.getLogger(__name__)
_MAX_WAITING_COMMANDS: Final = 4096


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine may hold.

    Attributes:
        max_sessions: sessions open at once.
        max_cached_sessions: sessions remembered, open or idle, at most; open ones always are.
        idle_ttl_s: seconds that an idle session is remembered.
        max_proposal_nodes: nodes under one base; what is asked for beyond it is not drafted.
    """

    max_sessions: int
    max_cached_sessions: int
    idle_ttl_s: float
    max_proposal_nodes: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is; see GetLoadResponse."""

    num_active_sessions: int = 0
    num_cached_sessions: int = 0
    kv_used_bytes: int = 0
    num_passes: int = 0
    model_time_s: float = 0.0
    num_tokens: int = 0
    num_stale_messages: int = 0


@dataclass(slots=True, eq=False)
class _Drafting:
    """A branch, whom it is for, and how much of it has been sent."""

    seat: Seat
    base: Base
    branch: Branch
    num_sent: int = 0

    def next_part(self) -> Reply | None:
        """Returns what has come since the last part."""
        branch = self.branch
        if branch.refusal is not None:
            return Refused(self.seat.handle, branch.refusal)
        nodes = tuple(branch.nodes[self.num_sent :])
        if not nodes and not branch.complete:
            return None
        part = ProposalPart(self.seat.handle, self.base, self.num_sent + 1, nodes, branch.complete)
        self.num_sent += len(nodes)
        return part


class Engine:
    """Runs a drafter in one thread of its own. `submit` and `end_stream` are for the event loop.

    All state of sessions belongs to that thread. Between two steps it applies every command that has come, so that a
    newer base replaces an older one at the next step, and replies leave once a step.

    Args:
        drafter: what drafts; used in that thread only, but for its `info`.
        limits: what the engine may hold.
        on_failure: called, in that thread, when an error that is no session's ends it.
    """

    def __init__(self, drafter: Drafter, limits: EngineLimits, on_failure: Callable[[], object] = lambda: None) -> None:
        self._drafter = drafter
        self._limits = limits
        self._on_failure = on_failure
        self._inbox: Inbox[Command] = Inbox(_MAX_WAITING_COMMANDS)
        self._sessions = Sessions(
            max_open=limits.max_sessions,
            max_cached=limits.max_cached_sessions,
            idle_ttl_s=limits.idle_ttl_s,
            forget=drafter.forget,
        )
        self._draftings: dict[str, _Drafting] = {}
        self._replies: defaultdict[ReplyStream, list[Reply]] = defaultdict(list)
        self._load = EngineLoad()
        self._num_passes = self._num_tokens = self._num_stale = 0
        self._model_time_s = 0.0
        self._draining = False
        self._quiet = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is; never older than a step."""
        return self._load

    @property
    def draining(self) -> bool:
        """Whether sessions are no longer opened."""
        return self._draining

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step."""
        self._inbox.close()
        self._thread.join()

    async def submit(self, command: Command) -> None:
        """Hands a command to the thread; waits while too many wait."""
        await self._inbox.put(command)

    def end_stream(self, stream: ReplyStream) -> None:
        """Ends a stream's sessions at once, however many commands wait."""
        self._inbox.put_now(EndStream(stream))

    async def drain(self, patience_s: float) -> None:
        """Opens no more sessions; returns when none is open any more, or after `patience_s` seconds."""
        self._inbox.put_now(BeginDrain())
        await asyncio.to_thread(self._quiet.wait, patience_s)

    def _run(self) -> None:
        try:
            while not self._inbox.closed:
                self._turn()
        except Exception:
            _LOG.exception("the draft engine failed")
            self._on_failure()
        finally:
            self._quiet.set()

    def _turn(self) -> None:
        idle = not self._draftings
        for command in self._inbox.take(wait=idle, timeout_s=self._sessions.next_expiry_s() if idle else None):
            self._apply(command)
        self._sessions.expire()
        self._step()
        self._publish()
        self._send_replies()

    def _apply(self, command: Command) -> None:
        match command:
            case OpenSession() | AdvanceSession():
                self._try(command)
            case CloseSession(seat):
                self._close([seat])
            case EndStream(stream):
                self._close(self._sessions.seats_of(stream))
                self._send_replies()
                stream.end()
            case BeginDrain():
                self._draining = True

    def _try(self, command: OpenSession | AdvanceSession) -> None:
        seat = command.seat
        try:
            if isinstance(command, OpenSession):
                self._open(command)
            else:
                self._advance(command)
        except OutriderError as error:
            self._num_stale += isinstance(error, Fenced)
            self._replies[seat.stream].append(Refused(seat.handle, error))

    def _open(self, command: OpenSession) -> None:
        if self._draining:
            raise Draining("the draft is shutting down")
        session = self._sessions.open(command.seat, command.session_id, command.fencing_token, command.terms)
        if (lost := self._draftings.pop(command.session_id, None)) is not None:
            error = Fenced("the session was opened again elsewhere")
            self._replies[lost.seat.stream].append(Refused(lost.seat.handle, error))
        self._replies[command.seat.stream].append(Opened(command.seat.handle, len(session.token_ids)))

    def _advance(self, command: AdvanceSession) -> None:
        session = self._sessions.at(command.seat, command.base.fencing_token)
        self._draftings.pop(session.session_id, None)
        same_len = session.apply(command.span)
        self._drafter.truncate(session.session_id, same_len)
        branch = Branch(session.session_id, session.token_ids, session.terms, self._num_nodes(session, command))
        self._draftings[session.session_id] = _Drafting(command.seat, command.base, branch)

    def _num_nodes(self, session: Session, command: AdvanceSession) -> int:
        """Returns how many nodes are of use: asked for, allowed, and before the ends of context and request."""
        terms = session.terms
        return min(
            command.num_speculative_tokens,
            self._limits.max_proposal_nodes,
            self._drafter.info.max_session_len - command.base.len,
            terms.prompt_len + terms.parameters.max_tokens - command.base.len,
        )

    def _close(self, seats: Iterable[Seat]) -> None:
        for seat in seats:
            session = self._sessions.close(seat)
            if session is not None:
                self._draftings.pop(session.session_id, None)

    def _step(self) -> None:
        branches = [drafting.branch for drafting in self._draftings.values() if not drafting.branch.complete]
        if branches:
            started_s = time.perf_counter()
            self._draft(branches)
            self._model_time_s += time.perf_counter() - started_s
        for drafting in list(self._draftings.values()):
            if (part := drafting.next_part()) is not None:
                self._replies[drafting.seat.stream].append(part)
            if drafting.branch.complete:
                del self._draftings[drafting.branch.session_id]

    def _draft(self, branches: Sequence[Branch]) -> None:
        """Runs one step; where it fails, each session by itself, so that only those that fail are refused."""
        try:
            self._num_tokens += self._drafter.step(branches)
            self._num_passes += 1
            return
        except Exception as error:
            _LOG.exception("a draft step failed", extra={"num_sessions": len(branches)})
            failure = error if isinstance(error, OutriderError) else OutriderError("the draft failed")
        for branch in branches:
            self._drafter.forget(branch.session_id)  # what a broken pass has cached is not known
        if len(branches) == 1:
            branches[0].refuse(failure)
            return
        for branch in branches:
            if not branch.complete:
                self._draft([branch])

    def _publish(self) -> None:
        self._load = EngineLoad(
            num_active_sessions=self._sessions.num_open,
            num_cached_sessions=self._sessions.num_known,
            kv_used_bytes=self._drafter.used_bytes,
            num_passes=self._num_passes,
            model_time_s=self._model_time_s,
            num_tokens=self._num_tokens,
            num_stale_messages=self._num_stale,
        )
        if self._draining and not self._sessions.num_open:
            self._quiet.set()

    def _send_replies(self) -> None:
        for stream, replies in self._replies.items():
            stream.post(replies)
        self._replies.clear()
