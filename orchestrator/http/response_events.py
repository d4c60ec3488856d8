"""How the Responses API writes a response: one object, or its typed events."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestrator.http.errors import HttpError, encoded
from orchestrator.http.forms import Choice, Form, notice_of, report_of
from orchestrator.http.held_output import HeldOutput
from orchestrator.http.response_items import ItemEvent, ResponseItems
from outrider.v1 import generation_pb2

PREFIX: Final = "resp_"
_NUM_FIRST_EVENTS: Final = 2
_STATUSES: Final = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
_ERROR_CODES: Final = {"RateLimitError": "rate_limit_exceeded", "BadRequestError": "invalid_prompt"}
_CONSTANT: Final[Mapping[str, Any]] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


class ResponseForm(Form):
    """A response of items, and their events.

    The events of a resumed stream follow those that the client has: their numbers are higher, and the last ones have
    all text.

    Args:
        response_id: see `Form`.
        model: see `Form`.
        echo: fields that repeat the request.
        held: what the client has; None for a new request.
        is_parsed: whether the output has parts; else its text is one message.
    """

    def __init__(
        self, response_id: str, model: str, echo: Mapping[str, Any], held: HeldOutput | None, *, is_parsed: bool
    ) -> None:
        super().__init__(response_id, model, 1)
        self._echo = echo
        self._held = held
        self._is_parsed = is_parsed
        self.has_begun = held is not None
        self._items = ResponseItems(response_id.removeprefix(PREFIX))
        self._num_events = 0

    def begin(self, *, is_resumed: bool) -> bytes:
        """Return the events that come before the output; a client that resumes has them."""
        message = [] if self._is_parsed else self._items.open_message()
        if self._held is not None or is_resumed:
            # An event has a token at least, and a token an event, besides those of the items.
            self._num_events = _NUM_FIRST_EVENTS + len(message) + (self._held.num_tokens if self._held else 0)
            return b""
        response = self._response("in_progress", [])
        first = [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]
        return b"".join(first) + self._written(message)

    def delta(self, choice: Choice, delta: generation_pb2.Delta) -> bytes:
        """Return the events of new output."""
        parts = self._parts(delta.text, delta.parts)
        if self._held is not None:
            held, parts = self._held.split(delta.token_ids, parts)
            self._num_events += sum(len(self._items.push(token)) for token in held)
        events = self._items.push(parts)
        if not delta.HasField("statistics"):
            return self._written(events)
        return self._written(events[:-1]) + self._report(events[-1:], {"speculation": report_of(delta)})

    def notice(self, choice: Choice, notice: generation_pb2.Notice) -> bytes:
        """Return an event without text: events of our own would break strict clients."""
        return self._report([], {"speculation": notice_of(notice)})

    def finish(self, choice: Choice, finished: generation_pb2.Finished) -> bytes:
        """Return the rest of the output, and the events that have all of it."""
        if self._held is not None:
            self._held.check()
        events = self._items.push(self._parts(finished.text, finished.parts))
        status = _STATUSES[choice.finish_reason or "abort"]
        if self._items.is_empty:
            events += self._items.open_message()
        events += self._items.close(_item_status(status))
        last = "response.completed" if status == "completed" else "response.incomplete"
        return self._written(events) + self._event(last, response=self._ended(status))

    def end(self) -> bytes:
        """Return nothing: the last event was written."""
        return b""

    def failure(self, error: HttpError) -> bytes:
        """Return the events that end a stream that fails."""
        response = self._response("failed", self._items.output("incomplete"))
        code = _ERROR_CODES.get(error.kind, "server_error")
        response["error"] = {"code": code, "message": error.message}
        told = {"code": str(error.code or error.status), "message": error.message, "param": error.parameter}
        return self._event("error", **told) + self._event("response.failed", response=response)

    def whole(self) -> dict[str, Any]:
        """Return the response."""
        choice = self.choices[0]
        self._items.push(self._parts("".join(choice.text), choice.parts))
        if self._items.is_empty:
            self._items.open_message()
        return self._ended(_STATUSES[choice.finish_reason or "abort"])

    def _ended(self, status: str) -> dict[str, Any]:
        response = self._response(status, self._items.output(_item_status(status)))
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        num_input, num_output = self.num_prompt_tokens, self.num_output_tokens
        response["usage"] = {
            "input_tokens": num_input,
            # Tokens that providers bill as written to a cache: here there are none.
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
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

    def _parts(self, text: str, parts: Sequence[generation_pb2.OutputPart]) -> Sequence[generation_pb2.OutputPart]:
        if self._is_parsed:
            return parts
        return [generation_pb2.OutputPart(content=text)] if text else []

    def _report(self, events: list[ItemEvent], extra: Mapping[str, Any]) -> bytes:
        """Return the last of some events, or one without text, with what only those get who ask for it."""
        event = events[0] if events else self._items.empty_delta()
        if event is None:
            return self._event("response.in_progress", response=self._response("in_progress", []), **extra)
        return self._event(event.kind, **event.fields, **extra)

    def _written(self, events: Sequence[ItemEvent]) -> bytes:
        return b"".join(self._event(event.kind, **event.fields) for event in events)

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = encoded({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"%sevent: %s\ndata: %s\n\n" % (self.position, kind.encode(), content)


def _item_status(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"
