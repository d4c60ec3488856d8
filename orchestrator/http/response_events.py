"""How the Responses API writes a response: one object, or its typed events."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestrator.http.errors import HttpError, encoded
from orchestrator.http.forms import Choice, Form, notice_of, report_of
from orchestrator.text.output import OutputText
from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2

PREFIX: Final = "resp_"
_NUM_FIRST_EVENTS: Final = 4
_STATUSES: Final = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
_ERROR_CODES: Final = {"RateLimitError": "rate_limit_exceeded", "BadRequestError": "invalid_prompt"}
_CONSTANT: Final[Mapping[str, Any]] = {
    "background": False,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


class HeldText:
    """The text that the client of a resumed stream has: that of its first tokens.

    Args:
        num_tokens: tokens that it has.
        output: the text of an output, from its start.
    """

    def __init__(self, num_tokens: int, output: OutputText) -> None:
        self.num_tokens = num_tokens
        self._output = output
        self._num_left = num_tokens
        self._num_held = 0
        self._num_seen = 0

    def rest(self, token_ids: Sequence[int], text: str) -> str:
        """Return the part of the next tokens' text that the client lacks."""
        if self._num_left:
            held = token_ids[: self._num_left]
            self._num_left -= len(held)
            self._num_held += len(self._output.absorb(held).text)
        start = max(0, self._num_held - self._num_seen)
        self._num_seen += len(text)
        return text[start:]

    def check(self) -> None:
        """Raise `InvalidArgument` where the whole output has fewer tokens than the client claims to have."""
        if self._num_left:
            num = self.num_tokens - self._num_left
            problem = f"Last-Event-ID has offset {self.num_tokens}, the output has {num} tokens"
            raise InvalidArgument(problem, "Last-Event-ID")


class ResponseForm(Form):
    """A response of one message with one text, and its events.

    The events of a resumed stream follow those that the client has: their numbers are higher, and the last ones have
    the whole text.

    Args:
        response_id: see `Form`.
        model: see `Form`.
        echo: fields that repeat the request.
        held: text that the client has; None for a new request.
    """

    def __init__(self, response_id: str, model: str, echo: Mapping[str, Any], held: HeldText | None) -> None:
        super().__init__(response_id, model, 1)
        self._echo = echo
        self._held = held
        self.has_begun = held is not None
        self._item_id = f"msg_{response_id.removeprefix(PREFIX)}"
        # A part has a token at least, so a client with k tokens has had k of them at most.
        self._num_events = 0 if held is None else _NUM_FIRST_EVENTS + held.num_tokens

    def begin(self, *, is_resumed: bool) -> bytes:
        """Return the events that come before text; a client that resumes has them."""
        if self._held is not None or is_resumed:
            return b""
        response = self._response("in_progress", [])
        item = {**self._item("in_progress", ""), "content": []}
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place(), part=_part("")),
            )
        )

    def delta(self, choice: Choice, delta: generation_pb2.Delta) -> bytes:
        """Return the event with new text."""
        choice.text.append(delta.text)
        text = delta.text if self._held is None else self._held.rest(delta.token_ids, delta.text)
        extra = {"speculation": report_of(delta)} if delta.HasField("statistics") else {}
        return self._text_event(text, extra) if text or extra else b""

    def notice(self, choice: Choice, notice: generation_pb2.Notice) -> bytes:
        """Return an event without text: events of our own would break strict clients."""
        return self._text_event("", {"speculation": notice_of(notice)})

    def finish(self, choice: Choice, finished: generation_pb2.Finished) -> bytes:
        """Return the rest of the text, and the events that have all of it."""
        text = finished.text
        if self._held is not None:
            self._held.check()
        choice.text.append(text)
        whole = "".join(choice.text)
        response = self.whole()
        is_complete = response["status"] == "completed"
        events = [self._text_event(text, {})] if text else []
        events += [
            self._event("response.output_text.done", **self._place(), text=whole, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(whole)),
            self._event("response.output_item.done", output_index=0, item=response["output"][0]),
            self._event("response.completed" if is_complete else "response.incomplete", response=response),
        ]
        return b"".join(events)

    def end(self) -> bytes:
        """Return nothing: the last event was written."""
        return b""

    def failure(self, error: HttpError) -> bytes:
        """Return the events that end a stream that fails."""
        response = self._response("failed", [self._item("incomplete", "".join(self.choices[0].text))])
        code = _ERROR_CODES.get(error.kind, "server_error")
        response["error"] = {"code": code, "message": error.message}
        told = {"code": str(error.code or error.status), "message": error.message, "param": error.parameter}
        return self._event("error", **told) + self._event("response.failed", response=response)

    def whole(self) -> dict[str, Any]:
        """Return the response."""
        choice = self.choices[0]
        status = _STATUSES[choice.finish_reason or "abort"]
        item_status = "completed" if status == "completed" else "incomplete"
        response = self._response(status, [self._item(item_status, "".join(choice.text))])
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        num_input, num_output = self.num_prompt_tokens, self.num_output_tokens
        response["usage"] = {
            "input_tokens": num_input,
            # Tokens that providers bill as written to a cache: here there are none.
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }
        response["metrics"] = self.metrics()
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            **_CONSTANT,
            **self._echo,
            "usage": None,
        }

    def _item(self, status: str, text: str) -> dict[str, Any]:
        content = [_part(text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _text_event(self, text: str, extra: Mapping[str, Any]) -> bytes:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[], **extra)

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = encoded({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"%sevent: %s\ndata: %s\n\n" % (self.position, kind.encode(), content)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
