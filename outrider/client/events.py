"""The events of a generation (accepted, deltas, finished) and the generation that they add up to."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum

from outrider import wire
from outrider.client.messages import Message, ToolCall
from outrider.client.parts import ContentPart, OutputPart, ReasoningPart, ToolCallPart, part_from_message
from outrider.client.statistics import Statistics, statistics_from_message
from outrider.errors import DataLoss
from outrider.parameters import FinishReason
from outrider.tokens import TokenLogprobs, TokenOrigin
from outrider.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was accepted; the first event, exactly once, however often the stream was resumed.

    Attributes:
        request_id: names the request within its session.
        session_id: the session that keeps its tokens.
        seed: the seed in force, drawn by the service where the request gave none.
        num_prompt_tokens: tokens of this request's prompt, chat template included.
        session_len: tokens of the session before this request's prompt.
    """

    request_id: str
    session_id: str
    seed: int
    num_prompt_tokens: int
    session_len: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Committed output tokens, each exactly once and in order.

    Attributes:
        offset: of the first token within the request's output.
        token_ids: the tokens.
        text: what became certain with these tokens; may be empty, is never cumulative.
        origins: how each token came to be; empty where that is no longer known, as after a resume.
        logprobs: of each token, where requested and known.
        statistics: since the last resume; None unless the request asks for a report.
        texts: the part of `text` that became certain with each token, where the request asks for a report.
        parts: the parts of the output that became certain with these tokens, where the request has them.
        drafters: where a draft combines several drafters: of each token the one that proposed it, or those that did,
            joined by "+"; "" for the target's own. Empty where that is not known.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[TokenOrigin, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    statistics: Statistics | None = None
    texts: tuple[str, ...] = ()
    parts: tuple[OutputPart, ...] = ()
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended; the last event.

    Attributes:
        finish_reason: why.
        num_output_tokens: output tokens in all.
        text: what became certain with the end.
        statistics: tokens, passes and times.
        parts: the parts of the output that became certain with the end, where the request has them.
        num_reasoning_tokens: output tokens of the reasoning, its end included, where the request has parts.
    """

    finish_reason: FinishReason
    num_output_tokens: int
    text: str
    statistics: Statistics
    parts: tuple[OutputPart, ...] = ()
    num_reasoning_tokens: int = 0


class NoticeKind(Enum):
    """What a notice tells of."""

    TARGET_REPLACED = "target_replaced"
    DRAFT_LOST = "draft_lost"
    TOKENS_RECOMPUTED = "tokens_recomputed"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Notice:
    """A change that the text does not show; only requests with `Speculation.report` get notices.

    Attributes:
        kind: another target continues, the draft is lost, a target recomputed the KV cache of output tokens, or a part
            of a long prompt was run.
        reason: of the error behind it; empty without one.
        num_tokens: tokens that were recomputed; of a prefill, tokens of session and prompt that are done.
    """

    kind: NoticeKind
    reason: str = ""
    num_tokens: int = 0


Event = Accepted | Delta | Finished | Notice


@dataclass(slots=True)
class Generation:
    """A whole generation, put together from its events with `add`.

    `text` is the concatenation of every event's text; `accepted` and `finished` are None until they have come. Where
    the request has parts, `content`, `reasoning` and `tool_calls` are what they add up to.
    """

    accepted: Accepted | None = None
    finished: Finished | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Accepted():
                self.accepted = event
            case Delta():
                self.text += event.text
                self.token_ids += event.token_ids
                self.logprobs += event.logprobs
                self._add_parts(event.parts)
            case Finished():
                self.text += event.text
                self._add_parts(event.parts)
                self.finished = event

    def _add_parts(self, parts: Iterable[OutputPart]) -> None:
        for part in parts:
            match part:
                case ContentPart():
                    self.content += part.text
                case ReasoningPart():
                    self.reasoning += part.text
                case ToolCallPart() if part.name:
                    self.tool_calls.append(ToolCall(part.id, part.name, part.arguments))
                # The rest of a call whose beginning came before a resumption has nothing to go to.
                case ToolCallPart() if self.tool_calls:
                    last = self.tool_calls[-1]
                    self.tool_calls[-1] = last._replace(arguments=last.arguments + part.arguments)

    @property
    def message(self) -> Message:
        """The answer as the next request has it, where this one has parts."""
        return Message("assistant", self.content, self.reasoning, tuple(self.tool_calls))

    @property
    def session_id(self) -> str:
        """The session; empty before acceptance."""
        return self.accepted.session_id if self.accepted else ""

    @property
    def seed(self) -> int:
        """The seed in force; 0 before acceptance."""
        return self.accepted.seed if self.accepted else 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not."""
        return self.finished.finish_reason if self.finished else None

    @property
    def statistics(self) -> Statistics:
        """Tokens, passes and times; zeros while it has not ended."""
        return self.finished.statistics if self.finished else Statistics()


async def collected(events: AsyncGenerator[Event, None]) -> Generation:
    """Return the generation that the events add up to, and close their iterator."""
    generation = Generation()
    async with aclosing(events):
        async for event in events:
            generation.add(event)
    return generation


def event_from_message(message: generation_pb2.GenerateResponse) -> Event:
    """Return the event; raise `DataLoss` for one of an unknown kind, which cannot be skipped safely."""
    match message.WhichOneof("event"):
        case "accepted":
            return _accepted(message.accepted)
        case "delta":
            return _delta(message.delta)
        case "finished":
            return _finished(message.finished)
        case "notice":
            return _notice(message.notice)
        case unknown:
            raise DataLoss(f"the stream has an event of unknown kind {unknown}")


def _accepted(message: generation_pb2.Accepted) -> Accepted:
    return Accepted(
        message.request_id, message.session_id, message.seed, message.num_prompt_tokens, message.session_len
    )


def _delta(message: generation_pb2.Delta) -> Delta:
    return Delta(
        offset=message.offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        origins=tuple(wire.origin_from_number(origin) for origin in message.origins),
        logprobs=tuple(wire.logprobs_from_message(logprobs) for logprobs in message.logprobs),
        statistics=statistics_from_message(message.statistics) if message.HasField("statistics") else None,
        texts=tuple(message.texts),
        parts=tuple(part_from_message(part) for part in message.parts),
        drafters=tuple(message.drafters),
    )


def _notice(message: generation_pb2.Notice) -> Notice:
    name = generation_pb2.NoticeKind.Name(message.kind).removeprefix("NOTICE_KIND_").lower()
    return Notice(NoticeKind(name), message.reason, message.num_tokens)


def _finished(message: generation_pb2.Finished) -> Finished:
    reason = wire.finish_from_number(message.finish_reason)
    if reason is None:
        raise DataLoss(f"the stream ended with unknown finish_reason {message.finish_reason}")
    parts = tuple(part_from_message(part) for part in message.parts)
    return Finished(
        reason,
        message.num_output_tokens,
        message.text,
        statistics_from_message(message.statistics),
        parts,
        message.num_reasoning_tokens,
    )
