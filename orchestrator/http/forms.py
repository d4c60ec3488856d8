"""What is known of a request's choices, and the parts that the forms of all routes share: usage, metrics, reports."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from orchestrator.http.errors import HttpError, body_of, encoded
from outrider import wire
from outrider.parameters import FinishReason
from outrider.v1 import generation_pb2, tokens_pb2

_FINISHES: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
_ORIGINS: Final = {
    tokens_pb2.TOKEN_ORIGIN_ACCEPTED: "accepted",
    tokens_pb2.TOKEN_ORIGIN_RECOVERED: "recovered",
    tokens_pb2.TOKEN_ORIGIN_BONUS: "bonus",
}
DONE: Final = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """A choice so far.

    Attributes:
        index: its number.
        accepted: once it was.
        offset: output tokens that the client has.
        text: its text, where it is collected.
        token_ids: likewise.
        logprobs: likewise.
        parts: likewise, where the request has any.
        finished: once it has.
    """

    index: int
    accepted: generation_pb2.Accepted | None = None
    offset: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tokens_pb2.TokenLogprobs] = field(default_factory=list)
    parts: list[generation_pb2.OutputPart] = field(default_factory=list)
    finished: generation_pb2.Finished | None = None

    def collect(self, event: generation_pb2.GenerateResponse) -> None:
        """Keep an event for a response in one piece."""
        match event.WhichOneof("event"):
            case "delta":
                self.text.append(event.delta.text)
                self.token_ids += event.delta.token_ids
                self.logprobs += event.delta.logprobs
                self.parts += event.delta.parts
            case "finished":
                self.text.append(event.finished.text)
                self.parts += event.finished.parts

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it has not."""
        reason = wire.finish_from_number(self.finished.finish_reason) if self.finished else None
        return None if reason is None else _FINISHES[reason]

    @property
    def has_calls(self) -> bool:
        """Whether its output has calls of tools, those before a resumption too; False while it has not ended."""
        return self.finished is not None and self.finished.num_tool_calls > 0


class Form(ABC):
    """The form of a response: how the events of its choices are written. A route has a subclass.

    Args:
        response_id: with the route's prefix.
        model: name of the model, as the client knows it.
        num_choices: number of choices.
        num_per_prompt: choices that share a prompt, which counts once.

    Attributes:
        has_begun: whether the client has output already, also where the message resumes at 0: a request that is not
            known any more is then an error, and does not begin anew.
    """

    stream_type = b"text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"
    has_begun = False

    def __init__(self, response_id: str, model: str, num_choices: int, num_per_prompt: int = 1) -> None:
        self.response_id = response_id
        self.model = model
        self.choices = [Choice(index) for index in range(num_choices)]
        self._num_per_prompt = num_per_prompt

    # What subclasses write.

    def begin(self, *, is_resumed: bool) -> bytes:
        """Return the first part of a stream; all choices are accepted."""
        return b""

    @abstractmethod
    def delta(self, choice: Choice, delta: generation_pb2.Delta) -> bytes:
        """Return the part of a stream for new tokens."""

    def notice(self, choice: Choice, notice: generation_pb2.Notice) -> bytes:
        """Return the part of a stream for a notice, which only those get who ask for a report."""
        return b""

    @abstractmethod
    def finish(self, choice: Choice, finished: generation_pb2.Finished) -> bytes:
        """Return the part of a stream for the end of a choice, and what became certain with it."""

    def end(self) -> bytes:
        """Return the last part of a stream."""
        return DONE

    def failure(self, error: HttpError) -> bytes:
        """Return the last part of a stream that fails."""
        return b"data: " + encoded(body_of(error)) + b"\n\n" + DONE

    @abstractmethod
    def whole(self) -> Any:
        """Return the response in one piece; all choices have ended and were collected."""

    def error_body(self, error: HttpError) -> Any:
        """Return the JSON object of an error before the response began."""
        return body_of(error)

    # What they share.

    @property
    def created(self) -> int:
        """When the request was first accepted, in seconds since 1970."""
        accepted = self.choices[0].accepted
        return accepted.create_time.seconds if accepted else 0

    @property
    def position(self) -> bytes:
        """The `id:` line of a part of a stream: what the header Last-Event-ID continues from."""
        offsets = ",".join(str(choice.offset) for choice in self.choices)
        return f"id: {self.response_id}:{offsets}\n".encode()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, sessions included."""
        prompts = [choice.accepted for choice in self.choices[:: self._num_per_prompt] if choice.accepted]
        return sum(accepted.session_len + accepted.num_prompt_tokens for accepted in prompts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs, those before a resumption too."""
        return sum(choice.finished.num_output_tokens for choice in self.choices if choice.finished)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were in a KV cache."""
        finished = [choice.finished for choice in self.choices[:: self._num_per_prompt] if choice.finished]
        return sum(item.statistics.num_cached_prompt_tokens for item in finished)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all choices, where outputs have parts."""
        return sum(choice.finished.num_reasoning_tokens for choice in self.choices if choice.finished)

    def usage(self) -> dict[str, Any]:
        """Return the tokens that the request used."""
        num_prompt, num_output = self.num_prompt_tokens, self.num_output_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        details: dict[str, int] = {}
        if self.num_reasoning_tokens:
            details["reasoning_tokens"] = self.num_reasoning_tokens
        known = [choice.finished.statistics for choice in self.choices if choice.finished]
        if num_predicted := sum(item.num_prediction_tokens for item in known):
            num_accepted = sum(item.num_accepted_prediction_tokens for item in known)
            details["accepted_prediction_tokens"] = num_accepted
            details["rejected_prediction_tokens"] = max(0, num_predicted - num_accepted)
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def metrics(self) -> dict[str, Any]:
        """Return the figures of speculation, all choices together, under vLLM's names; counted since a resumption."""
        known = [choice.finished.statistics for choice in self.choices if choice.finished]
        return {"speculative_decoding": speculation_figures(known)}


def speculation_figures(known: Sequence[generation_pb2.GenerationStatistics]) -> dict[str, Any]:
    """Return the figures of speculation of some requests, under vLLM's names.

    `acceptance_histogram[j]` is the number of passes that kept exactly j drafted tokens; `num_spec_tokens` is the most
    that any pass kept.
    """
    num_steps = sum(item.num_drafts for item in known)
    num_drafted = sum(item.num_draft_tokens for item in known)
    num_accepted = sum(item.num_accepted_tokens for item in known)
    most = max((len(item.num_accepted_tokens_per_pos) for item in known), default=0)
    # Passes that kept at least so many tokens.
    at_least = [num_steps, *(0 for _ in range(most)), 0]
    for item in known:
        for position, num in enumerate(item.num_accepted_tokens_per_pos, start=1):
            at_least[position] += num
    return {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 0.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [more - less for more, less in pairwise(at_least)],
        "num_spec_steps": num_steps,
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": num_accepted,
        "num_spec_tokens": most,
    }


def report_of(delta: generation_pb2.Delta) -> dict[str, Any]:
    """Return the key `speculation` of a part with tokens, for those who ask for a report."""
    report: dict[str, Any] = {
        "token_ids": list(delta.token_ids),
        "texts": list(delta.texts),
        "origins": [_ORIGINS.get(origin) for origin in delta.origins],
        "statistics": statistics_of(delta.statistics),
    }
    if delta.drafters:
        report["drafters"] = list(delta.drafters)
    return report


def notice_of(notice: generation_pb2.Notice) -> dict[str, Any]:
    """Return the key `speculation` of a part with a notice."""
    kind = generation_pb2.NoticeKind.Name(notice.kind).removeprefix("NOTICE_KIND_").lower()
    content: dict[str, Any] = {"kind": kind}
    if notice.reason:
        content["reason"] = notice.reason
    if notice.num_tokens:
        content["num_tokens"] = notice.num_tokens
    return {"notice": content}


def statistics_of(statistics: generation_pb2.GenerationStatistics) -> dict[str, Any]:
    """Return the statistics of a request so far, under the names of generation.proto."""
    return {
        "num_target_passes": statistics.num_target_passes,
        "num_drafts": statistics.num_drafts,
        "num_draft_tokens": statistics.num_draft_tokens,
        "num_accepted_tokens": statistics.num_accepted_tokens,
        "num_accepted_tokens_by_drafter": dict(statistics.num_accepted_tokens_by_drafter),
        "drafter": statistics.drafter,
        "draft_at": statistics.draft_at,
        "num_recomputed_tokens": statistics.num_recomputed_tokens,
        "num_fallbacks": dict(statistics.num_fallbacks),
        "tokens_per_second": round(statistics.tokens_per_second, 3),
    }
