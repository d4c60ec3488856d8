"""The thread that drafts: every step brings the sessions that wait for proposals further.

Any exception that one session causes ends drafting for that session, and nothing else; then a probe shows whether the
drafter drafts at all. Only a probe that fails ends the engine.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from draft_service.engine.commands import (
    AdvanceSession,
    BeginDrain,
    CloseSession,
    Command,
    EndStream,
    FeaturesMissing,
    ForgetSession,
    GiveFeatures,
    Opened,
    OpenSession,
    Proposed,
    Refused,
    Reply,
    ReplyStream,
    Seat,
    SessionCommand,
)
from draft_service.engine.probe import probe
from draft_service.engine.sessions import Session, Sessions
from outrider.drafters.drafter import Drafter, OpenProposal
from outrider.drafters.stepping import SentProposal, Stepper
from outrider.errors import Draining, Fenced, OutriderError, RequestFailed
from outrider.serving.inbox import Inbox, ReadBudget
from outrider.serving.spans import TRACER, context_of, fail
from outrider.serving.unexpected import UnexpectedErrors
from outrider.tokens import MAX_PROPOSAL_NODES

_LOG: Final = logging.getLogger(__name__)
_STREAM_ENDED: Final = "STREAM_ENDED"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine may hold.

    Attributes:
        max_sessions: sessions open at once.
        max_cached_sessions: sessions remembered, open or idle, at most; open ones always are.
        idle_ttl_s: seconds that an idle session is remembered.
    """

    max_sessions: int
    max_cached_sessions: int
    idle_ttl_s: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is; see GetLoadResponse.

    Attributes:
        num_active_sessions: open ones.
        num_cached_sessions: open or idle.
        kv_used_bytes: memory of their caches.
        num_passes: steps of the drafter.
        model_time_s: seconds of all steps.
        num_tokens: that they ran.
        num_stale_messages: whose base or fencing token was old.
        num_nodes: nodes that were sent.
        num_asked: times that a session asked for a proposal.
        num_late: of these, those whose text went on before a node was there, because other sessions' were made first.
        shared_time_s: seconds of all steps that a session alone would not have taken.
    """

    num_active_sessions: int = 0
    num_cached_sessions: int = 0
    kv_used_bytes: int = 0
    num_passes: int = 0
    model_time_s: float = 0.0
    num_tokens: int = 0
    num_stale_messages: int = 0
    num_nodes: int = 0
    num_asked: int = 0
    num_late: int = 0
    shared_time_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Drafting:
    """A proposal, whom it is for, and which features were asked for.

    Attributes:
        seat: whose proposal it is.
        sent: it, and how much of it has been sent.
        asked_at: monotonic time at which nodes were last asked for.
    """

    seat: Seat
    sent: SentProposal
    asked_at: float = field(default_factory=time.monotonic)
    num_feature_frames: int = 0
    has_asked: bool = False
    has_gap: bool = False

    def _question(self, start: int) -> Reply | None:
        """Asks for features, once; and once more where what came begins behind them."""
        asks = self.has_gap or not self.has_asked
        self.has_asked, self.has_gap = True, False
        return FeaturesMissing(self.seat.handle, start, self.num_feature_frames) if asks else None

    def is_late(self, alone_s: float) -> bool:
        """Whether nodes were asked for, and none has been sent for longer than it takes, because of other sessions.

        Without others it takes the step that is running and one of its own, of `alone_s` seconds each.
        """
        is_owed = not self.sent.num_sent and self.sent.can_go_on and self.proposal.num_speculative_tokens > 0
        return is_owed and time.monotonic() - self.asked_at > 2 * alone_s > 0

    @property
    def proposal(self) -> OpenProposal:
        """What is drafted."""
        return self.sent.proposal

    def next_reply(self, step_time_s: float) -> Reply | None:
        """Returns what there is to say since the last reply; `step_time_s` is what a step takes."""
        proposal = self.proposal
        if proposal.refusal is not None:
            return Refused(self.seat.handle, proposal.refusal)
        if proposal.missing_features_from is not None:
            return self._question(proposal.missing_features_from)
        part = self.sent.next_part(step_time_s)
        return None if part is None else Proposed(self.seat.handle, part)


class Engine:
    """Runs a drafter in one thread of its own. `submit` and `end_stream` are for the event loop.

    All state of sessions belongs to that thread. Between two steps it applies the commands that have come, so that a
    newer base replaces an older one at the next step, and replies leave once a step.

    Args:
        drafter: what drafts; used in that thread only, but for its `info`.
        limits: what the engine may hold.
        on_failure: called, in that thread, when the drafter drafts no more.
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: EngineLimits,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._drafter = drafter
        self._limits = limits
        self._on_failure = on_failure
        self._inbox: Inbox[Command] = Inbox()
        self._unexpected = UnexpectedErrors()
        self._is_suspect = False
        self._sessions = Sessions(
            max_open=limits.max_sessions,
            max_cached=limits.max_cached_sessions,
            idle_ttl_s=limits.idle_ttl_s,
            forget=self._forget,
        )
        self._draftings: dict[str, _Drafting] = {}
        self._replies: defaultdict[ReplyStream, list[Reply]] = defaultdict(list)
        self._load = EngineLoad()
        self._stepper = Stepper(drafter)
        self._num_stale = self._num_sent = self._num_asked = self._num_late = 0
        self._draining = False
        self._busy_since: float | None = None
        self._quiet = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is; never older than a step."""
        return self._load

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds that the step, or whatever the thread does now, has taken; 0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

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

    async def submit(self, command: SessionCommand, num_bytes: int = 0) -> None:
        """Hands a command for a session to the thread; waits while too much of its stream waits.

        Args:
            command: the command.
            num_bytes: of the frame that it came in.
        """
        await self._inbox.put(command.seat.stream, command, num_bytes)

    def end_stream(self, stream: ReplyStream) -> None:
        """Ends a stream's sessions behind its commands, without waiting for room."""
        self._inbox.put_now(stream, EndStream(stream))

    async def drain(self, patience_s: float) -> None:
        """Opens no more sessions; returns when none is open any more, or after `patience_s` seconds."""
        self._inbox.put_now(None, BeginDrain())
        await asyncio.to_thread(self._quiet.wait, patience_s)

    def _run(self) -> None:
        try:
            while not self._inbox.closed:
                self._turn()
            # Streams that were cut at the end still have sessions to end.
            self._inbox.read(self._apply)
        except Exception:
            _LOG.exception("the draft engine failed")
            self._on_failure()
        finally:
            self._quiet.set()

    def _turn(self) -> None:
        idle = not any(drafting.sent.can_go_on for drafting in self._draftings.values())
        self._busy_since = None
        if idle:
            self._inbox.wait(self._sessions.next_expiry_s())
        self._busy_since = time.monotonic()
        self._inbox.read(self._apply, ReadBudget.beside(self._stepper.step_time_s, self._sessions.num_open))
        self._sessions.expire()
        self._step()
        if self._is_suspect:
            self._is_suspect = False
            # Before anyone is told: a session must not be blamed for a drafter that fails.
            probe(self._drafter)
        self._publish()
        self._send_replies()

    def _apply(self, command: Command) -> None:
        match command:
            case OpenSession() | AdvanceSession() | GiveFeatures():
                self._try(command)
            case CloseSession(seat):
                self._close([seat])
            case EndStream(stream):
                self._close(self._sessions.seats_of(stream), _STREAM_ENDED)
                self._send_replies()
                stream.end()
            case BeginDrain():
                self._draining = True
            case ForgetSession(_, session_id):
                self._sessions.forget(session_id)

    def _try(self, command: OpenSession | AdvanceSession | GiveFeatures) -> None:
        seat = command.seat
        try:
            match command:
                case OpenSession():
                    self._open(command)
                case AdvanceSession():
                    self._advance(command)
                case GiveFeatures():
                    self._give(command)
        except OutriderError as error:
            self._num_stale += isinstance(error, Fenced)
            self._replies[seat.stream].append(Refused(seat.handle, error))
        except Exception as error:
            self._fail(seat, error)

    def _fail(self, seat: Seat, error: Exception) -> None:
        """Ends drafting for a session that failed by itself."""
        session = self._sessions.session(seat)
        self._suspect("drafting failed for a session", error, session=session.session_id if session else "")
        self._close([seat], RequestFailed.reason)
        if session is not None:
            self._sessions.forget(session.session_id)
        failure = RequestFailed("drafting failed for this session")
        self._replies[seat.stream].append(Refused(seat.handle, failure))

    def _suspect(self, message: str, error: Exception, **about: object) -> None:
        """Notes that something failed that should not: the drafter is probed before anyone is told."""
        self._unexpected.log(message, error, **about)
        self._is_suspect = True

    def _forget(self, session_id: str) -> None:
        """Has the drafter drop what it keeps of a session."""
        try:
            self._drafter.forget(session_id)
        except Exception as error:
            self._suspect("a session could not be forgotten", error)

    def _open(self, command: OpenSession) -> None:
        if self._draining:
            raise Draining("the draft is shutting down")
        session = self._sessions.open(command.seat, command.session_id, command.fencing_token, command.terms)
        if (lost := self._end(command.session_id)) is not None:
            error = Fenced("the session was opened again elsewhere")
            self._replies[lost.seat.stream].append(Refused(lost.seat.handle, error))
        _end_span(session, Fenced.reason)
        session.num_sent = 0
        session.span = TRACER.start_span(
            "draft",
            context_of(command.traceparent),
            attributes={"outrider.request_id": command.request_id, "outrider.known_len": len(session.token_ids)},
        )
        features_len = self._drafter.resume(session.session_id)
        self._replies[command.seat.stream].append(Opened(command.seat.handle, len(session.token_ids), features_len))

    def _advance(self, command: AdvanceSession) -> None:
        session = self._sessions.at(command.seat, command.base.fencing_token)
        # A span without tokens only takes back what is behind it, if anything is.
        is_news = bool(command.span.token_ids) and command.span.start == len(session.token_ids)
        same_len = session.apply(command.span)
        self._num_asked += command.num_speculative_tokens > 0
        drafting = self._draftings.get(session.session_id)
        self._num_late += drafting is not None and is_news and drafting.is_late(self._stepper.alone_s)
        if drafting is not None and is_news and not drafting.proposal.refusal:
            self._ask(drafting.proposal, session, command)
            if self._drafter.advance(drafting.proposal, command.span.token_ids):
                drafting.sent.advance(command.base)
                drafting.asked_at = time.monotonic()
                return
        self._end(session.session_id)
        self._drafter.truncate(session.session_id, same_len)
        num = self._num_nodes(session, command)
        proposal = OpenProposal(session.session_id, session.token_ids, session.terms, num)
        proposal.max_len = self._drafter.info.max_session_len
        self._ask(proposal, session, command)
        sent = SentProposal(command.base, proposal, command.base.len)
        self._draftings[session.session_id] = _Drafting(
            command.seat, sent, num_feature_frames=session.num_feature_frames
        )

    def _ask(self, proposal: OpenProposal, session: Session, command: AdvanceSession) -> None:
        """Notes what is asked for, within what is allowed."""
        proposal.num_speculative_tokens = self._num_nodes(session, command)
        proposal.max_nodes = min(command.max_nodes, MAX_PROPOSAL_NODES)
        proposal.lookahead = min(command.lookahead, MAX_PROPOSAL_NODES) if proposal.num_speculative_tokens > 0 else 0

    def _end(self, session_id: str) -> _Drafting | None:
        """Ends what is drafted for a session; returns it."""
        drafting = self._draftings.pop(session_id, None)
        if drafting is not None:
            try:
                self._drafter.end(drafting.proposal)
            except Exception as error:
                self._suspect("a proposal could not be ended", error)
                self._forget(session_id)
        return drafting

    def _give(self, command: GiveFeatures) -> None:
        session = self._sessions.session(command.seat)
        if session is None:
            self._num_stale += 1
            return
        session.num_feature_frames += 1
        has_gap = self._drafter.give(session.session_id, command.features)
        if (drafting := self._draftings.get(session.session_id)) is not None:
            drafting.num_feature_frames = session.num_feature_frames
            drafting.has_gap = drafting.has_gap or has_gap
            drafting.proposal.missing_features_from = None

    def _num_nodes(self, session: Session, command: AdvanceSession) -> int:
        """Returns how many nodes are of use: asked for, allowed, and before the ends of context and request."""
        terms = session.terms
        return min(
            command.num_speculative_tokens,
            MAX_PROPOSAL_NODES,
            self._drafter.info.max_session_len - command.base.len,
            terms.prompt_len + terms.parameters.max_tokens - command.base.len,
        )

    def _close(self, seats: Iterable[Seat], error: str = "") -> None:
        for seat in seats:
            session = self._sessions.close(seat)
            if session is not None:
                self._end(session.session_id)
                _end_span(session, error)

    def _step(self) -> None:
        proposals = [drafting.proposal for drafting in self._draftings.values() if drafting.sent.can_go_on]
        if proposals:
            self._run_step(proposals)
        for drafting in list(self._draftings.values()):
            num_sent = drafting.sent.num_sent
            try:
                reply = drafting.next_reply(self._stepper.step_time_s)
            except Exception as error:
                self._fail(drafting.seat, error)
                continue
            if reply is not None:
                self._replies[drafting.seat.stream].append(reply)
            num_sent = drafting.sent.num_sent - num_sent
            self._num_sent += num_sent
            if (session := self._sessions.session(drafting.seat)) is not None:
                session.num_sent += num_sent
            if drafting.proposal.refusal is not None:
                self._end(drafting.proposal.session_id)

    def _run_step(self, proposals: list[OpenProposal]) -> None:
        num_failed = self._stepper.num_failed
        try:
            self._stepper.step(proposals)
        except Exception as error:
            self._suspect("a draft step failed", error)
            for proposal in proposals:
                proposal.refuse(RequestFailed("drafting failed for this session"))
        self._is_suspect = self._is_suspect or self._stepper.num_failed > num_failed

    def _publish(self) -> None:
        self._load = EngineLoad(
            num_active_sessions=self._sessions.num_open,
            num_cached_sessions=self._sessions.num_known,
            kv_used_bytes=self._drafter.used_bytes,
            num_passes=self._stepper.num_passes,
            model_time_s=self._stepper.model_time_s,
            num_tokens=self._stepper.num_tokens,
            num_stale_messages=self._num_stale,
            num_nodes=self._num_sent,
            num_asked=self._num_asked,
            num_late=self._num_late,
            shared_time_s=self._stepper.shared_time_s,
        )
        if self._draining and not self._sessions.num_open:
            self._quiet.set()

    def _send_replies(self) -> None:
        all_replies, self._replies = self._replies, defaultdict(list)
        for stream, replies in all_replies.items():
            try:
                stream.post(replies)
            except Exception as error:
                self._unexpected.log("replies could not be sent", error)
                self._close(self._sessions.seats_of(stream), _STREAM_ENDED)
                stream.end()


def _end_span(session: Session, error: str = "") -> None:
    """Ends the span of the request that a session was open for, if there is one that has not ended."""
    if not session.span.is_recording():
        return
    session.span.set_attribute("outrider.num_nodes", session.num_sent)
    if error:
        fail(session.span, error)
    session.span.end()
