"""What a target knows of its sessions: resident tokens and KV caches, and the requests that run on them."""

import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field

from opentelemetry import trace

from outrider.errors import Fenced, InvalidArgument, KVCacheMiss
from outrider.lm.model import KVCache
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving import spans
from outrider.serving.idle_sessions import IdleSessions
from outrider.speculation.randomness import KeyedSource
from outrider.tokens import Base, TokenSpan
from target_service.engine.results import RoundAbout, RoundResult
from target_service.engine.speculation import Speculation
from target_service.engine.stream import Stream

_MAX_FENCING_TOKENS = 100_000


@dataclass(slots=True, eq=False)
class Resident:
    """A session whose tokens this target holds, generating or not.

    Invariant: `cache.cached_len <= len(token_ids)`; the tokens beyond `cached_len` are still to be run. Tokens beyond
    `committed_len` may never have been committed: they are only trusted while the request that output them runs.
    """

    session_id: str
    cache: KVCache
    token_ids: list[int] = field(default_factory=list)
    committed_len: int = 0
    is_gone: bool = False
    """Whether it is forgotten as soon as no request runs on it."""

    def apply(self, span: TokenSpan, vocabulary_size: int, max_len: int) -> None:
        """Truncates to the span's start and appends it.

        Raises:
            KVCacheMiss: the span starts beyond the tokens that are here.
            InvalidArgument: a token id is outside the vocabulary, or the session becomes too long.
        """
        if span.start > len(self.token_ids):
            raise KVCacheMiss(f"span starts at {span.start}, {len(self.token_ids)} are here", self.cache.cached_len)
        if not span.token_ids:
            raise InvalidArgument("span has no tokens", "span")
        if any(token_id >= vocabulary_size for token_id in span.token_ids):
            raise InvalidArgument(f"span has a token id outside the vocabulary of {vocabulary_size}", "span")
        if span.end > max_len:
            raise InvalidArgument(f"span ends at {span.end}, the longest session has {max_len} tokens", "span")
        self._share_prefix(span)

    def _share_prefix(self, span: TokenSpan) -> None:
        # What is already here stays cached: a replay from an earlier start costs only what really differs. The last
        # token is always run (again), because its logits decide the next one.
        known = self.token_ids[span.start : span.end]
        same = next((i for i, (a, b) in enumerate(zip(known, span.token_ids, strict=False)) if a != b), len(known))
        del self.token_ids[span.start + same :]
        self.token_ids += span.token_ids[same:]
        self.cache.truncate(min(span.start + same, len(self.token_ids) - 1))

    def rest(self, length: int) -> None:
        """Keeps the tokens up to position `length` until the next request, and holds no KV: it may be found again."""
        del self.token_ids[length:]
        self.cache.truncate(length)
        self.cache.release()


@dataclass(slots=True)
class RoundSums:
    """What the rounds of a request came to.

    Attributes:
        num_rounds: so far.
        num_output_tokens: that they gave.
        num_draft_tokens: of verified main lines.
        num_accepted: proposed tokens that were kept.
        model_s: seconds of their passes.
        wait_s: seconds that they waited for proposals.
        queue_s: seconds that they were ready before their passes began.
    """

    num_rounds: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    model_s: float = 0.0
    wait_s: float = 0.0
    queue_s: float = 0.0

    @property
    def attributes(self) -> dict[str, int | float]:
        """Them, as a span has them."""
        return {
            "outrider.num_rounds": self.num_rounds,
            "gen_ai.usage.output_tokens": self.num_output_tokens,
            "outrider.num_draft_tokens": self.num_draft_tokens,
            "outrider.num_accepted": self.num_accepted,
            "outrider.model_s": self.model_s,
            "outrider.wait_s": self.wait_s,
            "outrider.queue_s": self.queue_s,
        }

    def add(self, result: RoundResult, about: RoundAbout) -> None:
        """Adds a round."""
        self.num_rounds += 1
        self.num_output_tokens += len(result.token_ids)
        self.num_draft_tokens += result.num_draft_tokens
        self.num_accepted += result.num_accepted
        self.model_s += about.model_time_s
        self.wait_s += about.wait_time_s
        self.queue_s += about.queue_time_s


@dataclass(slots=True, eq=False)
class Request:
    """A request that runs on a resident session, from `open` to `close`.

    Attributes:
        number: grows with every request of this target.
        stream: identity of the stream it came on.
        handle: its name on that stream.
        start_len: session length at which generation starts.
        cache_salt: see `OpenCommand`.
        speculation: what has arrived ahead of its text.
        round_started: monotonic time of the last verdict.
        feature_layers: layers whose features the session's draft asked for.
        features_len: positions from 0 on whose features it was sent, or has no need of.
        has_start: whether the caller's span has come, up to `start_len`. What a warm session has by itself does not do:
            the span would take back what was output behind it.
        is_restoring: whether blocks of its KV cache are on their way.
        num_recomputed: see `Verdict`.
        request_id: the orchestrator's name for it, for logs.
        span: of its trace.
        sums: what its rounds came to.
    """

    number: int
    stream: Stream
    handle: int
    resident: Resident
    fencing_token: int
    parameters: SamplingParameters
    rule: AcceptanceRule
    prompt_len: int
    stop_token_ids: frozenset[int]
    start_len: int
    window_end: int
    source: KeyedSource
    speculation: Speculation
    cache_salt: bytes = b""
    round_started: float = 0.0
    feature_layers: tuple[int, ...] = ()
    features_len: int = 0
    has_start: bool = False
    is_restoring: bool = False
    num_recomputed: int = 0
    finished: bool = False
    request_id: str = ""
    span: trace.Span = trace.INVALID_SPAN
    sums: RoundSums = field(default_factory=RoundSums)

    @property
    def base(self) -> Base:
        """What the next proposal and verdict continue."""
        return Base(len(self.resident.token_ids), self.fencing_token)

    @property
    def num_output(self) -> int:
        """Tokens of this request's output so far."""
        return len(self.resident.token_ids) - self.prompt_len

    @property
    def num_uncached(self) -> int:
        """Tokens still to be run."""
        return len(self.resident.token_ids) - self.resident.cache.cached_len

    @property
    def can_run(self) -> bool:
        """Whether there is anything to run, and room in the window for what it outputs."""
        length = len(self.resident.token_ids)
        is_wanted = self.has_start and length < self.window_end and self.num_uncached > 0
        return is_wanted and not self.finished and not self.is_restoring

    @property
    def log_fields(self) -> dict[str, str]:
        """What records that are about it have."""
        ids = {"request_id": self.request_id, "session": self.resident.session_id}
        return {**ids, **spans.log_fields(self.span)}

    def end(self, error: str = "") -> None:
        """Ends its span: it runs no more, because of `error` where that is not empty."""
        self.span.set_attributes(self.sums.attributes)
        if error:
            spans.fail(self.span, error)
        self.span.end()

    @property
    def room(self) -> int:
        """Tokens that a round may output: to the end of the window and of the request."""
        length = len(self.resident.token_ids)
        return min(self.window_end - length, self.parameters.max_tokens - self.num_output)

    def begin_round(self, now: float) -> None:
        """Begins a round, and decides how long it waits for a proposal."""
        self.round_started = now
        num_left = self.parameters.max_tokens - self.num_output
        self.speculation.begin(num_left, now)

    def is_ready(self, now: float) -> bool:
        """Whether the round need not wait any longer."""
        return self.speculation.is_ready(len(self.resident.token_ids), now)


class FencingTokens:
    """The highest fencing token seen of each session; lower ones are refused. The least recent are forgotten."""

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()

    def check(self, session_id: str, fencing_token: int) -> None:
        """Notes the token; raises `Fenced` when a higher one was seen."""
        highest = self._highest.get(session_id, 0)
        if fencing_token < highest:
            raise Fenced(f"fencing token {fencing_token} is older than {highest}")
        self._highest[session_id] = fencing_token
        self._highest.move_to_end(session_id)
        if len(self._highest) > _MAX_FENCING_TOKENS:
            self._highest.popitem(last=False)


class Residents:
    """All resident sessions: those that a request runs on, and idle ones, up to a number and an age.

    Args:
        max_residents: sessions of both kinds; the least recently used idle ones go first.
        idle_ttl_s: seconds that an idle session is kept.
    """

    def __init__(self, max_residents: int, idle_ttl_s: float) -> None:
        self._max_residents = max_residents
        self._busy: dict[str, Resident] = {}
        self._idle: IdleSessions[Resident] = IdleSessions(idle_ttl_s)

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    def take(self, session_id: str) -> Resident | None:
        """Returns an idle session for a request, if it is here."""
        resident = self._idle.pop(session_id)
        if resident is not None:
            self._busy[session_id] = resident
        return resident

    def add(self, resident: Resident) -> None:
        """Takes a new session in, for a request."""
        self._busy[resident.session_id] = resident
        self.expire()

    def rest(self, resident: Resident, length: int) -> None:
        """Ends a request's use of a session, whose tokens up to position `length` are kept unless it is forgotten."""
        resident.rest(length)
        if self._busy.get(resident.session_id) is not resident:
            return  # it was dropped
        del self._busy[resident.session_id]
        if not resident.is_gone:
            self._idle.add(resident.session_id, resident)
            self.expire()

    def drop(self, resident: Resident) -> None:
        """Forgets a session that a request runs on and that failed.

        The end of its KV cache, which `KVCache.release` would make findable, may be wrong. Pages that cannot be given
        back are lost: that is better than to give them to two sessions.
        """
        self._busy.pop(resident.session_id, None)
        with contextlib.suppress(Exception):
            resident.cache.truncate(0)

    def forget(self, session_id: str) -> None:
        """Forgets a session, if it is here: at once where it is idle, else when its request ends."""
        if (resident := self._busy.get(session_id)) is not None:
            resident.is_gone = True
        else:
            self._idle.pop(session_id)

    def expire(self) -> None:
        """Forgets the idle sessions that are too old or too many; they hold no memory of the KV cache."""
        self._idle.expire(self._max_residents - len(self._busy))

    def next_expiry_s(self) -> float | None:
        """Returns the seconds until an idle session gets too old; None where there is none."""
        return self._idle.next_expiry_s()
