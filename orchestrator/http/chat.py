"""POST /v1/chat/completions."""

import json
from typing import Any, Final

from orchestrator.http.bodies import ChatBody
from orchestrator.http.errors import HttpError, encoded
from orchestrator.http.forms import DONE, Choice, Form, notice_of, report_of
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.requests import Prompts, chat_prompt, prompts_of
from outrider.v1 import generation_pb2

PREFIX: Final = "chatcmpl-"
NAMES: Final = {
    "chat": "messages",
    "role": "messages",
    "prompt": "messages",
    "logprobs": "top_logprobs",
    "template_variables": "chat_template_kwargs",
}


def prompts(body: ChatBody) -> Prompts:
    """Return the prompt of a body; raise `HttpError` for fields that contradict each other."""
    given = {number for number in (body.max_tokens, body.max_completion_tokens) if number is not None}
    if len(given) > 1:
        raise _refusal("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise _refusal("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    message = chat_prompt(
        body.messages, body.chat_template_kwargs, body.add_generation_prompt, continues=bool(body.session_id)
    )
    return prompts_of(body, [message], given.pop() if given else 0, logprobs)


def _refusal(message: str, parameter: str) -> HttpError:
    return HttpError(400, "BadRequestError", message, parameter, "invalid_argument")


class ChatForm(Form):
    """Chat completions, and their chunks.

    Args:
        response_id: see `Form`.
        model: see `Form`.
        num_choices: see `Form`.
        texts: of tokens, for log-probabilities.
        with_logprobs: whether choices have log-probabilities.
        with_usage: whether a stream ends with the usage.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        num_choices: int,
        texts: TokenTexts,
        *,
        with_logprobs: bool,
        with_usage: bool,
    ) -> None:
        super().__init__(response_id, model, num_choices, num_choices)
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._head = ""

    def begin(self, *, is_resumed: bool) -> bytes:
        """Return the chunks with the roles; a client that resumes has them."""
        common = {"id": self.response_id, "object": "chat.completion.chunk", "created": self.created}
        # What all chunks share is written once: a stream has one for each few tokens.
        self._head = json.dumps({**common, "model": self.model}, separators=(",", ":"))[:-1]
        if is_resumed:
            return b""
        return b"".join(self._chunk(choice, {"role": "assistant", "content": ""}) for choice in self.choices)

    def delta(self, choice: Choice, delta: generation_pb2.Delta) -> bytes:
        """Return the chunk with new text."""
        extra: dict[str, Any] = {}
        if delta.HasField("statistics"):
            extra["speculation"] = report_of(delta)
        logprobs = self._texts.chat(delta.token_ids, delta.logprobs) if self._with_logprobs else None
        if not delta.text and not extra and logprobs is None:
            return b""
        return self._chunk(choice, {"content": delta.text}, logprobs=logprobs, extra=extra)

    def notice(self, choice: Choice, notice: generation_pb2.Notice) -> bytes:
        """Return a chunk without text."""
        return self._chunk(choice, {}, extra={"speculation": notice_of(notice)})

    def finish(self, choice: Choice, text: str) -> bytes:
        """Return the chunk with the rest of the text and the reason of the end.

        They come together: the rest has no token of its own, so a client could not say that it has the one without the
        other.
        """
        return self._chunk(choice, {"content": text} if text else {}, finish_reason=choice.finish_reason)

    def end(self) -> bytes:
        """Return the usage where it was requested, then the end of the stream."""
        if not self._with_usage:
            return DONE
        usage = encoded({"choices": [], "usage": self.usage(), "metrics": self.metrics()})
        return b"%sdata: %s,%s\n\n%s" % (self.position, self._head.encode(), usage[1:], DONE)

    def whole(self) -> dict[str, Any]:
        """Return the chat completion."""
        return {
            "id": self.response_id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                    "logprobs": self._texts.chat(choice.token_ids, choice.logprobs) if self._with_logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in self.choices
            ],
            "usage": self.usage(),
            "metrics": self.metrics(),
        }

    def _chunk(
        self,
        choice: Choice,
        delta: dict[str, str],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choices = [{"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]
        content = encoded({"choices": choices, **(extra or {})})
        return b"%sdata: %s,%s\n\n" % (self.position, self._head.encode(), content[1:])
