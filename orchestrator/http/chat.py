"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any, Final

from orchestrator.http.bodies import ChatBody
from orchestrator.http.chunks import ChunkedForm
from orchestrator.http.errors import HttpError
from orchestrator.http.forms import Choice
from orchestrator.http.requests import Prompts, chat_prompt, prompts_of
from outrider.v1 import tokens_pb2

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
    if body.prediction is not None:
        message.predicted_text = body.prediction.text
    return prompts_of(body, [message], given.pop() if given else 0, logprobs)


def _refusal(message: str, parameter: str) -> HttpError:
    return HttpError(400, "BadRequestError", message, parameter, "invalid_argument")


class ChatForm(ChunkedForm):
    """Chat completions, and their chunks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first(self, choice: Choice) -> dict[str, Any]:
        """Return the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def output(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return the text, where there is any."""
        return {"delta": {"content": text} if text else {}}

    def answer(self, choice: Choice) -> dict[str, Any]:
        """Return the message."""
        return {"message": {"role": "assistant", "content": "".join(choice.text), "refusal": None}}

    def logprobs(
        self, choice: Choice, token_ids: Sequence[int], known: Sequence[tokens_pb2.TokenLogprobs]
    ) -> dict[str, Any]:
        """Return the log-probabilities, a list."""
        return self.texts.chat(token_ids, known)
