"""POST /v1/responses, its stateless core: text in, text out, nothing stored."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from orchestrator.http.bodies import GenerationBody, Sampling, Tokens
from orchestrator.http.body import Body
from orchestrator.http.errors import HttpError
from orchestrator.http.messages import ChatMessage
from orchestrator.http.requests import Prompts, chat_prompt, parameters_of, speculation_of
from orchestrator.http.response_events import PREFIX, HeldText, ResponseForm
from orchestrator.http.routes import Routes, RouteTable
from orchestrator.text.output import OutputText
from orchestrator.workers.model import Model
from outrider.v1 import generation_pb2

NAMES: Final = {"chat": "input", "role": "input", "prompt": "input", "max_tokens": "max_output_tokens"}


class InputPart(Body):
    """A part of a message's content; what earlier answers carry besides their text is accepted with them."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Body):
    """One message of the input."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]

    @property
    def message(self) -> ChatMessage:
        """The message as a chat has it; parts are joined by a line break, as in chat completions."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return ChatMessage(role=self.role, content=text)


class TextOptions(Body):
    """The form of the output."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"format": ({"type": "text"},), "verbosity": ("medium",)}


class ReasoningOptions(Body):
    """How the model reasons, which no field changes here."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "effort": ("none",),
        "summary": (),
        "generate_summary": (),
        "context": ("auto",),
        "mode": ("standard",),
    }


class ResponsesStreamOptions(Body):
    """Options of a stream."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


class ResponsesBody(Sampling, GenerationBody):
    """POST /v1/responses."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "parallel_tool_calls",
            "max_tool_calls",
        }
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "previous_response_id": (),
        "conversation": (),
        "context_management": ([],),
        # Of reasoning there is nothing that could be included.
        "include": ([], ["reasoning.encrypted_content"]),
        "moderation": (),
        "prompt": (),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: str | list[InputMessage]
    instructions: str | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: Tokens | None = Field(None, description="Absent: as many as fit.")
    metadata: dict[str, str] | None = None
    store: bool | None = Field(None, description="Responses are not stored: true is refused.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponsesStreamOptions | None = None


RESPONSES_ROUTES: Final[RouteTable] = (("POST", "/v1/responses", "responses", ResponsesBody),)


class ResponsesRoutes(Routes):
    """The route of the Responses API."""

    async def responses(self, request: Request) -> Response:
        """Respond to input."""
        body = ResponsesBody.parse(request.state.body)
        model = await self._model(body.model)

        def form(response_id: str, name: str, messages: list[generation_pb2.GenerateRequest]) -> ResponseForm:
            return ResponseForm(response_id, name, _echo(body, model), _held_text(messages[0], model))

        return self._answer(request, body, prompts(body), model, PREFIX, NAMES, form)


def prompts(body: ResponsesBody) -> Prompts:
    """Return the prompt of a body; raise `HttpError` for what this server does not do."""
    if body.store:
        raise _refusal("store is true, but responses are not stored", "store")
    if body.stream_options is not None and not body.stream:
        raise _refusal("stream_options goes with stream: true", "stream_options")
    if not body.input and not isinstance(body.input, str):
        raise _refusal("input has no messages", "input")
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += [item.message for item in body.input]
    message = chat_prompt(messages, continues=bool(body.session_id))
    # 0 stands for as many as fit.
    parameters = parameters_of(body, body.max_output_tokens or 0, None)
    return Prompts([message], 1, parameters, speculation_of(body.speculation), body.session_id or "")


def _held_text(message: generation_pb2.GenerateRequest, model: Model) -> HeldText | None:
    """Return the measure of what the client has of a stream that it resumes; None for a new one.

    The last events have the whole text, so the message is made to replay it from its start.
    """
    if not message.resume_offset:
        return None
    num_tokens, message.resume_offset = message.resume_offset, 0
    return HeldText(num_tokens, OutputText(model.tokenizer, model.parameters(message.parameters, seed=0)))


def _echo(body: ResponsesBody, model: Model) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    defaults = model.defaults
    temperature = defaults.temperature if defaults.HasField("temperature") else 1.0
    top_p = defaults.top_p if defaults.HasField("top_p") else 1.0
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": temperature if body.temperature is None else body.temperature,
        "top_p": top_p if body.top_p is None else body.top_p,
        "metadata": body.metadata or {},
    }


def _refusal(message: str, parameter: str) -> HttpError:
    return HttpError(400, "BadRequestError", message, parameter, "invalid_argument")
