"""POST /v1/completions."""

import json
from collections.abc import Sequence
from typing import Any, Final

from orchestrator.http.bodies import CompletionBody
from orchestrator.http.errors import HttpError, encoded
from orchestrator.http.forms import DONE, Choice, Form, notice_of, report_of
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.requests import Prompts, prompts_of, text_prompts
from orchestrator.workers.model import Model
from outrider.v1 import generation_pb2, tokens_pb2

PREFIX: Final = "cmpl-"
NAMES: Final = {"text": "prompt", "token_ids": "prompt"}
_MAX_TOKENS: Final = 16
"""OpenAI's default."""


def prompts(body: CompletionBody) -> Prompts:
    """Return the prompts of a body; raise `HttpError` for fields that do not go together."""
    if body.echo and body.logprobs is not None:
        problem = "echo does not go with logprobs: the prompt's tokens have none"
        raise HttpError(400, "BadRequestError", problem, "echo", "invalid_argument")
    return prompts_of(body, text_prompts(body.prompt), body.max_tokens or _MAX_TOKENS, body.logprobs)


def echoes(body: CompletionBody, messages: Sequence[generation_pb2.GenerateRequest], model: Model) -> list[str]:
    """Return the text that precedes each choice: its prompt, where the body asks for it."""
    if not body.echo:
        return [""] * len(messages)
    return [_prompt_text(message, model) for message in messages]


def _prompt_text(message: generation_pb2.GenerateRequest, model: Model) -> str:
    token_ids = message.token_ids.token_ids
    # What is wrong with token ids is said by the service, which checks them first.
    if not token_ids or model.tokenizer is None or len(token_ids) > model.max_session_len:
        return message.text
    if max(token_ids) >= model.vocabulary_size:
        return ""
    return model.tokenizer.backend.decode(list(token_ids), skip_special_tokens=True)


class CompletionForm(Form):
    """Completions, and their chunks.

    Args:
        response_id: see `Form`.
        model: see `Form`.
        echoed: text ahead of each choice.
        num_per_prompt: see `Form`.
        texts: of tokens, for log-probabilities.
        with_logprobs: whether choices have log-probabilities.
        with_usage: whether a stream ends with the usage.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        echoed: Sequence[str],
        num_per_prompt: int,
        texts: TokenTexts,
        *,
        with_logprobs: bool,
        with_usage: bool,
    ) -> None:
        super().__init__(response_id, model, len(echoed), num_per_prompt)
        self._echoed = echoed
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        # Where the text of each choice has come to, for the offsets of log-probabilities.
        self._lengths = [0] * len(echoed)
        self._head = ""

    def begin(self, *, is_resumed: bool) -> bytes:
        """Return the chunks with the prompts that are echoed; a client that resumes has them."""
        common = {"id": self.response_id, "object": "text_completion", "created": self.created, "model": self.model}
        self._head = json.dumps(common, separators=(",", ":"))[:-1]
        if is_resumed:
            return b""
        return b"".join(
            self._chunk(choice, echo) for choice, echo in zip(self.choices, self._echoed, strict=True) if echo
        )

    def delta(self, choice: Choice, delta: generation_pb2.Delta) -> bytes:
        """Return the chunk with new text."""
        extra: dict[str, Any] = {}
        if delta.HasField("statistics"):
            extra["speculation"] = report_of(delta)
        logprobs = self._logprobs(choice, delta.token_ids, delta.logprobs)
        if not delta.text and not extra and logprobs is None:
            return b""
        return self._chunk(choice, delta.text, logprobs=logprobs, extra=extra)

    def notice(self, choice: Choice, notice: generation_pb2.Notice) -> bytes:
        """Return a chunk without text."""
        return self._chunk(choice, "", extra={"speculation": notice_of(notice)})

    def finish(self, choice: Choice, text: str) -> bytes:
        """Return the chunk with the rest of the text and the reason of the end."""
        return self._chunk(choice, text, finish_reason=choice.finish_reason)

    def end(self) -> bytes:
        """Return the usage where it was requested, then the end of the stream."""
        if not self._with_usage:
            return DONE
        usage = encoded({"choices": [], "usage": self.usage(), "metrics": self.metrics()})
        return b"%sdata: %s,%s\n\n%s" % (self.position, self._head.encode(), usage[1:], DONE)

    def whole(self) -> dict[str, Any]:
        """Return the completion."""
        return {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": choice.index,
                    "text": echo + "".join(choice.text),
                    "logprobs": self._logprobs(choice, choice.token_ids, choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for choice, echo in zip(self.choices, self._echoed, strict=True)
            ],
            "usage": self.usage(),
            "metrics": self.metrics(),
        }

    def _logprobs(
        self, choice: Choice, token_ids: Sequence[int], known: Sequence[tokens_pb2.TokenLogprobs]
    ) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        found = self._texts.completion(token_ids, known, self._lengths[choice.index])
        self._lengths[choice.index] += sum(map(len, found["tokens"]))
        return found

    def _chunk(
        self,
        choice: Choice,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choices = [{"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}]
        content = encoded({"choices": choices, **(extra or {})})
        return b"%sdata: %s,%s\n\n" % (self.position, self._head.encode(), content[1:])
