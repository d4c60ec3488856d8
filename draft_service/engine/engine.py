"""The draft's engine: between two steps it applies commands, and every step extends the proposals of all sessions.

An unexpected exception that one session causes ends drafting for that session alone; then a probe shows whether the
drafter still works. Only a probe that fails ends the engine.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from draft_service.engine.commands import (
    AdvanceSession,
    CloseSession,
    Command,
    EndStream,
    ForgetSession,
    GiveFeatures,
    Handle,
    Opened,
    OpenSession,
    Refused,
)
from draft_service.engine.drafting import Drafting
from draft_service.engine.load import EngineLimits, EngineLoad
from draft_service.engine.probe import probe
from draft_service.engine.reply_queue import ReplyQueue
from draft_service.engine.sessions import Session, Sessions
from outrider.drafters.drafter import Drafter, DraftTerms, OpenProposal, give_bytes
from outrider.drafters.stepping import SentProposal, Stepper
from outrider.errors import Draining, Fenced, OutriderError, Overloaded, RequestFailed
from outrider.serving.engine_loop import EngineLoop
from outrider.serving.spans import TRACER, context_of
from outrider.tokens import MAX_PROPOSAL_NODES

_STREAM_ENDED: Final = "STREAM_ENDED"


class Engine:
    """Drafts for all sessions of this process; an `EngineLoop` calls it.

    A newer base replaces an older one at the next step. Replies leave once a step.

    Args:
        drafter: makes the proposals; used in the loop's thread only, but for its `info`.
        limits: sessions that the engine may hold.
        on_failure: called, in that thread, when the drafter works no more.

    Attributes:
        loop: runs the engine, and takes commands.
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: EngineLimits,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._drafter = drafter
        self._sessions = Sessions(
            max_open=limits.max_sessions,
            max_cached=limits.max_cached_sessions,
            idle_ttl_s=limits.idle_ttl_s,
            forget=self._forget,
        )
        self._draftings: dict[str, Drafting] = {}
        self._replies = ReplyQueue()
        self._load = EngineLoad()
        self._stepper = Stepper(drafter)
        self._num_stale = self._num_sent = self._num_requested = self._num_late = 0
        self.loop: EngineLoop[Command] = EngineLoop(self, self, name="draft-engine", on_failure=on_failure)

    @property
    def load(self) -> EngineLoad:
        """Counters as of the last turn. From any thread."""
        return self._load

    # The loop's thread calls the following methods.

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return self._sessions.num_open

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self._stepper.step_time_s

    def apply(self, command: Command) -> None:
        """Apply a command; see `CommandHandler`."""
        match command:
            case OpenSession():
                self._open(command)
            case AdvanceSession():
                self._advance(command)
            case GiveFeatures():
                self._give(command)
            case CloseSession(handle):
                self._close([handle])
            case EndStream(stream):
                self._close(self._sessions.handles_of(stream), _STREAM_ENDED)
                self._send_replies()
                stream.end()
            case ForgetSession(_, session_id):
                self._sessions.forget(session_id)

    def refuse(self, command: Command, error: OutriderError) -> None:
        """Refuse a command; the session stays open."""
        self._num_stale += isinstance(error, Fenced)
        if not isinstance(command, EndStream):
            self._replies.add(command.handle, Refused(command.handle.number, error))

    def fail(self, command: Command, error: Exception) -> None:
        """End drafting for the session of a command that raised an unexpected exception."""
        if isinstance(command, EndStream):
            self.loop.failures.record("a stream could not be ended", error)
        else:
            self._fail(command.handle, error)

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        self._sessions.expire()

    def step(self) -> bool:
        """Run a step for all proposals that it can extend; return whether another one could extend any."""
        proposals = [drafting.proposal for drafting in self._draftings.values() if drafting.sent.can_go_on]
        if proposals:
            self._run_step(proposals)
        for drafting in list(self._draftings.values()):
            self._reply_to(drafting)
        return any(drafting.sent.can_go_on for drafting in self._draftings.values())

    def publish(self) -> None:
        """Publish the counters, then send the replies of the turn."""
        self._load = EngineLoad(
            num_active_sessions=self._sessions.num_open,
            num_cached_sessions=self._sessions.num_known,
            kv_used_bytes=self._drafter.used_bytes,
            num_passes=self._stepper.num_passes,
            model_time_s=self._stepper.model_time_s,
            num_tokens=self._stepper.num_tokens,
            num_stale_messages=self._num_stale,
            num_nodes=self._num_sent,
            num_requested=self._num_requested,
            num_late=self._num_late,
            shared_time_s=self._stepper.shared_time_s,
        )
        self._send_replies()

    def wait_s(self) -> float | None:
        """Return the seconds until an idle session has to be forgotten; None where there is none."""
        return self._sessions.next_expiry_s()

    def probe(self) -> None:
        """Draft one token; raise `EngineFailed` if the drafter does not work any more."""
        probe(self._drafter)

    def _fail(self, handle: Handle, error: Exception) -> None:
        """End drafting for a session that failed by itself."""
        session = self._sessions.session(handle)
        session_id = session.session_id if session else ""
        self.loop.failures.record("drafting failed for a session", error, session=session_id)
        self._close([handle], RequestFailed.reason)
        if session is not None:
            self._sessions.forget(session_id)
        self._replies.add(handle, Refused(handle.number, RequestFailed("drafting failed for this session")))

    def _forget(self, session_id: str) -> None:
        """Have the drafter drop its state of a session."""
        try:
            self._drafter.forget(session_id)
        except Exception as error:
            self.loop.failures.record("a session could not be forgotten", error)

    def _open(self, command: OpenSession) -> None:
        if self.loop.is_draining:
            raise Draining("the draft is shutting down")
        terms = self._with_grammar(command.terms)
        try:
            session = self._sessions.open(command.handle, command.session_id, command.fencing_token, terms)
        except OutriderError:
            if terms.grammar is not None:
                terms.grammar.drop()
            raise
        if (lost := self._end(command.session_id)) is not None:
            error = Fenced("the session was opened again elsewhere")
            self._replies.add(lost.handle, Refused(lost.handle.number, error))
        session.end_span(Fenced.reason)
        session.num_sent = 0
        session.span = TRACER.start_span(
            "draft",
            context_of(command.traceparent),
            attributes={"outrider.request_id": command.request_id, "outrider.known_len": len(session.token_ids)},
        )
        features_len = self._drafter.resume(session.session_id)
        self._replies.add(command.handle, Opened(command.handle.number, len(session.token_ids), features_len))

    def _with_grammar(self, terms: DraftTerms) -> DraftTerms:
        """Return the terms with the constraint being compiled; what is drafted before it is ready has no mask."""
        constraint, compiler = terms.parameters.constraint, self._drafter.compiler
        if constraint is None or compiler is None:
            return terms
        with contextlib.suppress(Overloaded):
            return replace(terms, grammar=compiler.begin(constraint))
        return terms

    def _advance(self, command: AdvanceSession) -> None:
        session = self._sessions.at(command.handle, command.base.fencing_token)
        # A span without tokens only takes back the tokens behind it, if there are any.
        is_news = bool(command.span.token_ids) and command.span.start == len(session.token_ids)
        same_len = session.apply(command.span)
        self._num_requested += command.num_speculative_tokens > 0
        drafting = self._draftings.get(session.session_id)
        self._num_late += drafting is not None and is_news and drafting.is_late(self._stepper.alone_s)
        if drafting is not None and is_news and not drafting.proposal.refusal:
            self._set_sizes(drafting.proposal, session, command)
            if self._drafter.advance(drafting.proposal, command.span.token_ids):
                drafting.advance(command.base)
                return
        self._end(session.session_id)
        self._drafter.truncate(session.session_id, same_len)
        num = self._num_nodes(session, command)
        proposal = OpenProposal(session.session_id, session.token_ids, session.terms, num)
        proposal.max_len = self._drafter.info.max_session_len
        self._set_sizes(proposal, session, command)
        sent = SentProposal(command.base, proposal, command.base.len)
        self._draftings[session.session_id] = Drafting(
            command.handle, sent, num_feature_frames=session.num_feature_frames
        )

    def _set_sizes(self, proposal: OpenProposal, session: Session, command: AdvanceSession) -> None:
        """Set the sizes that a command requests, within their limits."""
        proposal.num_speculative_tokens = self._num_nodes(session, command)
        proposal.max_nodes = min(command.max_nodes, MAX_PROPOSAL_NODES)
        proposal.lookahead = min(command.lookahead, MAX_PROPOSAL_NODES) if proposal.num_speculative_tokens > 0 else 0

    def _num_nodes(self, session: Session, command: AdvanceSession) -> int:
        """Return the requested length of a main line, cut where the limits, the context or the request end."""
        terms = session.terms
        return min(
            command.num_speculative_tokens,
            MAX_PROPOSAL_NODES,
            self._drafter.info.max_session_len - command.base.len,
            terms.prompt_len + terms.parameters.max_tokens - command.base.len,
        )

    def _end(self, session_id: str) -> Drafting | None:
        """End the proposal of a session; return it if there was one."""
        drafting = self._draftings.pop(session_id, None)
        if drafting is not None:
            try:
                self._drafter.end(drafting.proposal)
            except Exception as error:
                self.loop.failures.record("a proposal could not be ended", error)
                self._forget(session_id)
        return drafting

    def _give(self, command: GiveFeatures) -> None:
        session = self._sessions.session(command.handle)
        if session is None:
            self._num_stale += 1
            return
        session.num_feature_frames += 1
        has_gap = give_bytes(self._drafter, session.session_id, command.features)
        if (drafting := self._draftings.get(session.session_id)) is not None:
            drafting.num_feature_frames = session.num_feature_frames
            drafting.has_gap = drafting.has_gap or has_gap
            drafting.proposal.missing_features_from = None

    def _close(self, handles: Iterable[Handle], error: str = "") -> None:
        for handle in handles:
            session = self._sessions.close(handle)
            if session is not None:
                self._end(session.session_id)
                session.end_span(error)

    def _run_step(self, proposals: list[OpenProposal]) -> None:
        num_failed = self._stepper.num_failed
        try:
            self._stepper.step(proposals)
        except Exception as error:
            self.loop.failures.record("a draft step failed", error)
            for proposal in proposals:
                proposal.refuse(RequestFailed("drafting failed for this session"))
        if self._stepper.num_failed > num_failed:
            self.loop.failures.suspect()

    def _reply_to(self, drafting: Drafting) -> None:
        """Queue the next reply about a proposal, if there is one; end a proposal that was refused."""
        num_sent = drafting.sent.num_sent
        try:
            reply = drafting.next_reply(self._stepper.step_time_s)
        except Exception as error:
            self._fail(drafting.handle, error)
            return
        if reply is not None:
            self._replies.add(drafting.handle, reply)
        num_sent = drafting.sent.num_sent - num_sent
        self._num_sent += num_sent
        if (session := self._sessions.session(drafting.handle)) is not None:
            session.num_sent += num_sent
        if drafting.proposal.refusal is not None:
            self._end(drafting.proposal.session_id)

    def _send_replies(self) -> None:
        for stream in self._replies.send():
            self._close(self._sessions.handles_of(stream), _STREAM_ENDED)
            stream.end()
