"""POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from orchestrator.http.bodies import ChatBody
from orchestrator.http.chunks import ChunkedForm
from orchestrator.http.forms import Choice
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.parsing import CallSoFar, Said, names_with, parse
from orchestrator.http.requests import Prompts, chat_prompt, prompts_of
from orchestrator.http.structure import refusal, structure_of
from orchestrator.http.tools import tools_of
from orchestrator.workers.model import Model
from outrider.v1 import generation_pb2, tokens_pb2

PREFIX: Final = "chatcmpl-"
NAMES: Final = {
    "chat": "messages",
    "role": "messages",
    "prompt": "messages",
    "logprobs": "top_logprobs",
    "template_variables": "chat_template_kwargs",
    **{name: "messages" for name in ("tool_calls", "tool_call_id", "reasoning")},
}


class ChatTerms(NamedTuple):
    """A chat as it is generated.

    Attributes:
        prompts: what to complete.
        names: the route's own names of generation.proto's fields.
        is_parsed: whether its output has parts.
    """

    prompts: Prompts
    names: Mapping[str, str]
    is_parsed: bool


def chat_terms(body: ChatBody, model: Model) -> ChatTerms:
    """Return how a chat is generated; raise `HttpError` for fields that contradict each other."""
    given = {number for number in (body.max_tokens, body.max_completion_tokens) if number is not None}
    if len(given) > 1:
        raise refusal("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise refusal("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    variables = body.chat_template_kwargs or {}
    message = chat_prompt(
        body.messages, variables, body.add_generation_prompt, continues=bool(body.session_id), tools=tools
    )
    is_parsed = parse(message, tools, model)
    if body.prediction is not None:
        message.predicted_text = body.prediction.text
    structure = tools.constrained(structure_of(body), model)
    prompts = prompts_of(body, [message], given.pop() if given else 0, logprobs, structure)
    return ChatTerms(prompts, names_with(NAMES, structure), is_parsed)


class ChatForm(ChunkedForm):
    """Chat completions, and their chunks.

    Args:
        response_id: see `Form`.
        model: see `Form`.
        num_choices: see `Form`.
        texts: see `ChunkedForm`.
        with_logprobs: see `ChunkedForm`.
        with_usage: see `ChunkedForm`.
        with_usage_so_far: see `ChunkedForm`.
        is_parsed: whether outputs have parts.
        with_reasoning: whether the reasoning is a part of the response.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        response_id: str,
        model: str,
        num_choices: int,
        texts: TokenTexts,
        *,
        with_logprobs: bool,
        with_usage: bool,
        with_usage_so_far: bool,
        is_parsed: bool,
        with_reasoning: bool = True,
    ) -> None:
        super().__init__(
            response_id,
            model,
            num_choices,
            num_choices,
            texts,
            with_logprobs=with_logprobs,
            with_usage=with_usage,
            with_usage_so_far=with_usage_so_far,
        )
        self._is_parsed = is_parsed
        self._with_reasoning = with_reasoning

    def first(self, choice: Choice) -> dict[str, Any]:
        """Return the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def output(self, choice: Choice, text: str, parts: Sequence[generation_pb2.OutputPart] = ()) -> dict[str, Any]:
        """Return the text, or the parts, where there are any."""
        if not self._is_parsed:
            return {"delta": {"content": text} if text else {}}
        said = Said.of(parts)
        delta: dict[str, Any] = {"content": said.content} if said.content else {}
        if said.reasoning and self._with_reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.calls:
            delta["tool_calls"] = [_call_piece(call) for call in said.calls]
        return {"delta": delta}

    def has_output(self, output: Mapping[str, Any]) -> bool:
        """Return whether a chunk has something to show."""
        return bool(output["delta"])

    def answer(self, choice: Choice) -> dict[str, Any]:
        """Return the message."""
        if not self._is_parsed:
            return {"message": {"role": "assistant", "content": "".join(choice.text), "refusal": None}}
        said = Said.of(choice.parts)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [_call(call) for call in said.calls]
        if said.reasoning and self._with_reasoning:
            message["reasoning_content"] = said.reasoning
        return {"message": message}

    def logprobs(
        self, choice: Choice, token_ids: Sequence[int], known: Sequence[tokens_pb2.TokenLogprobs]
    ) -> dict[str, Any]:
        """Return the log-probabilities, a list."""
        return self.texts.chat(token_ids, known)


def _call(call: CallSoFar) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_piece(call: CallSoFar) -> dict[str, Any]:
    """Return a call, or a piece of its arguments, as a chunk has it."""
    if call.name:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}
