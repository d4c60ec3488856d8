"""How Ollama's API writes its responses: lines of JSON, or one object."""

import json
from abc import abstractmethod
from datetime import UTC, datetime
from typing import Any, Final

from orchestrator.http.errors import HttpError, encoded, plain_body_of
from orchestrator.http.forms import Choice, Form, notice_of, report_of
from orchestrator.http.held_output import HeldOutput
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.ollama_messages import WholeCalls, call_of
from orchestrator.http.parsing import Said
from outrider.v1 import generation_pb2

_NS_PER_S: Final = 10**9


def rfc3339(time_s: float) -> str:
    """Return a time in seconds since 1970 as RFC 3339 has it."""
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


class OllamaForm(Form):
    """Lines of JSON for pieces of text, then one that has the figures of the whole request.

    Args:
        model: as the client named it.
        texts: of tokens, for log-probabilities.
        with_logprobs: whether lines have log-probabilities.
        is_parsed: whether the output has parts.
        held: what the client has of a stream that it resumes, where that may end within a call; None for none.
    """

    stream_type = b"application/x-ndjson"
    keep_alive = b""

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        *,
        with_logprobs: bool,
        is_parsed: bool = False,
        held: HeldOutput | None = None,
    ) -> None:
        super().__init__("", model, 1)
        self._is_parsed = is_parsed
        self._held = held
        self._calls = WholeCalls()
        self.has_begun = held is not None
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._head = b""

    @abstractmethod
    def content(self, said: Said) -> dict[str, Any]:
        """Return the keys that have text, reasoning and calls."""

    def begin(self, *, is_resumed: bool) -> bytes:
        """Return nothing: the first line is that of the first text."""
        # What all lines share is written once.
        self._head = json.dumps(self._shared(), separators=(",", ":"))[:-1].encode()
        return b""

    def delta(self, choice: Choice, delta: generation_pb2.Delta) -> bytes:
        """Return the line with new output."""
        said = self._said(delta)
        extra: dict[str, Any] = {}
        if delta.HasField("statistics"):
            extra["speculation"] = report_of(delta)
        if self._with_logprobs:
            extra["logprobs"] = self._texts.chat(delta.token_ids, delta.logprobs)["content"]
        is_empty = not (said.content or said.reasoning or said.calls or extra)
        return b"" if is_empty else self._line(said, {"done": False, **extra})

    def notice(self, choice: Choice, notice: generation_pb2.Notice) -> bytes:
        """Return a line without text."""
        return self._line(Said(), {"done": False, "speculation": notice_of(notice)})

    def finish(self, choice: Choice, finished: generation_pb2.Finished) -> bytes:
        """Return the last line, which has the rest of the output too."""
        if self._held is not None:
            self._held.check()
        said = self._calls.push(finished.parts) if self._is_parsed else Said(finished.text)
        said.calls += self._calls.finish()
        return self._line(said, self._figures(choice))

    def end(self) -> bytes:
        """Return nothing: the last line was written."""
        return b""

    def failure(self, error: HttpError) -> bytes:
        """Return the line that ends a stream that fails."""
        return encoded(plain_body_of(error)) + b"\n"

    def error_body(self, error: HttpError) -> Any:
        """Return an error as Ollama's clients read it."""
        return plain_body_of(error)

    def whole(self) -> dict[str, Any]:
        """Return the response in one object."""
        choice = self.choices[0]
        said = Said.of(choice.parts) if self._is_parsed else Said("".join(choice.text))
        response = {**self._shared(), **self.content(said), **self._figures(choice)}
        if self._with_logprobs:
            response["logprobs"] = self._texts.chat(choice.token_ids, choice.logprobs)["content"]
        return response

    def _shared(self) -> dict[str, Any]:
        accepted = self.choices[0].accepted
        begun = accepted.create_time if accepted else None
        return {"model": self.model, "created_at": rfc3339(begun.seconds + begun.nanos / _NS_PER_S if begun else 0)}

    def _said(self, delta: generation_pb2.Delta) -> Said:
        """Return what a client lacks of a delta."""
        if not self._is_parsed:
            return Said(delta.text)
        if self._held is None:
            return self._calls.push(delta.parts)
        held, rest = self._held.split(delta.token_ids, delta.parts)
        for parts in held:
            self._calls.push(parts)
        return self._calls.push(rest)

    def _line(self, said: Said, more: dict[str, Any]) -> bytes:
        return b"%s,%s\n" % (self._head, encoded({**self.content(said), **more})[1:])

    def _figures(self, choice: Choice) -> dict[str, Any]:
        finished = choice.finished
        if finished is None:
            return {}
        total_ns = round(finished.statistics.duration_s * _NS_PER_S)
        first_ns = round(finished.statistics.time_to_first_token_s * _NS_PER_S)
        return {
            "done": True,
            "done_reason": choice.finish_reason,
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": self.num_prompt_tokens,
            "prompt_eval_duration": first_ns,
            "eval_count": self.num_output_tokens,
            "eval_duration": max(0, total_ns - first_ns),
            "metrics": self.metrics(),
        }


class OllamaChatForm(OllamaForm):
    """Answers of /api/chat."""

    def content(self, said: Said) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning:
            message["thinking"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [call_of(call) for call in said.calls]
        return {"message": message}


class OllamaGenerateForm(OllamaForm):
    """Answers of /api/generate."""

    def content(self, said: Said) -> dict[str, Any]:
        """Return the text."""
        return {"response": said.content, **({"thinking": said.reasoning} if said.reasoning else {})}
