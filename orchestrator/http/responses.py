"""POST /v1/responses, its stateless core: text in, text out, nothing stored."""

from typing import Any, Final

from fastapi import Request
from starlette.responses import Response

from orchestrator.http.asgi import metadata
from orchestrator.http.body import Body
from orchestrator.http.held_output import held_output
from orchestrator.http.messages import ChatMessage
from orchestrator.http.parsing import names_with, parse
from orchestrator.http.requests import Prompts, chat_prompt, parameters_of, speculation_of
from orchestrator.http.response_bodies import (
    AllowedFunctionsChoice,
    NamedFunctionChoice,
    ResponsesBody,
    ResponseTool,
    TextFormat,
)
from orchestrator.http.response_events import PREFIX, ResponseForm
from orchestrator.http.response_input import input_messages
from orchestrator.http.routes import Routes, RouteTable
from orchestrator.http.session_header import with_session
from orchestrator.http.structure import Structure, made, refusal
from orchestrator.http.tools import Tools
from orchestrator.workers.model import Model
from outrider import wire
from outrider.v1 import generation_pb2

_OF_INPUT: Final = ("chat", "role", "prompt", "tool_calls", "tool_call_id", "reasoning")
NAMES: Final = {**dict.fromkeys(_OF_INPUT, "input"), "max_tokens": "max_output_tokens"}


RESPONSES_ROUTES: Final[RouteTable] = (("POST", "/v1/responses", "responses", ResponsesBody),)


class ResponsesRoutes(Routes):
    """The route of the Responses API."""

    async def responses(self, request: Request) -> Response:
        """Respond to input."""
        body = with_session(ResponsesBody.parse(request.state.body), request)
        model = await self._model(body.model)
        tools = _tools(body)
        structure = tools.constrained(_structure(body), model)
        given = prompts(body, tools, structure)
        is_parsed = parse(given.messages[0], tools, model)

        async def form(response_id: str, name: str, messages: list[generation_pb2.GenerateRequest]) -> ResponseForm:
            held = await held_output(messages[0], model, self._service, metadata(request.scope))
            return ResponseForm(response_id, name, _echo(body, model), held, is_parsed=is_parsed)

        return await self._answer(request, body, given, model, PREFIX, names_with(NAMES, structure), form)


def prompts(body: ResponsesBody, tools: Tools, structure: Structure | None) -> Prompts:
    """Return the prompt of a body; raise `HttpError` for what this server does not do.

    Args:
        body: the body.
        tools: its tools.
        structure: what the output must follow; None for free text.
    """
    if body.store:
        raise refusal("store is true, but responses are not stored", "store")
    if body.stream_options is not None and not body.stream:
        raise refusal("stream_options goes with stream: true", "stream_options")
    if not body.input and not isinstance(body.input, str):
        raise refusal("input has no items", "input")
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += input_messages(body.input)
    message = chat_prompt(messages, continues=bool(body.session_id), tools=tools)
    # 0 stands for as many as fit.
    parameters = parameters_of(body, body.max_output_tokens or 0, None)
    if structure is not None:
        parameters.constraint.CopyFrom(wire.constraint_to_message(structure.constraint))
    return Prompts([message], 1, parameters, speculation_of(body.speculation), body.session_id or "")


def _tools(body: ResponsesBody) -> Tools:
    kind: str
    allowed: list[str] | None
    match choice := body.tool_choice:
        case NamedFunctionChoice():
            kind, allowed = "required", [choice.name]
        case AllowedFunctionsChoice():
            kind, allowed = choice.mode, [item.name for item in choice.tools]
        case _:
            kind, allowed = choice or "auto", None
    functions = [tool.function for tool in body.tools or ()]
    return Tools(functions, kind, allowed, is_parallel=body.parallel_tool_calls is not False)


def _structure(body: ResponsesBody) -> Structure | None:
    """Return what the output must follow; None for free text; raise `HttpError`."""
    form, field = body.text.format if body.text else None, "text.format"
    if form is None:
        return None
    if form.type != "json_schema" and form.schema_ is not None:
        raise refusal(f"{field} has type {form.type}: schema does not belong to it", f"{field}.schema")
    if form.type == "text":
        return None
    if form.type == "json_object":
        return made(field, json_object=True)
    if form.schema_ is None:
        raise refusal(f"{field} has type json_schema: schema is missing", f"{field}.schema")
    return made(field, json_schema=form.schema_)


def _echo(body: ResponsesBody, model: Model) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    defaults = model.defaults
    temperature = defaults.temperature if defaults.HasField("temperature") else 1.0
    top_p = defaults.top_p if defaults.HasField("top_p") else 1.0
    form = body.text.format if body.text else None
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": temperature if body.temperature is None else body.temperature,
        "top_p": top_p if body.top_p is None else body.top_p,
        "metadata": body.metadata or {},
        "text": {"format": _echo_of_format(form)},
        "tools": [_echo_of_tool(tool) for tool in body.tools or ()],
        "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }


def _echo_of_format(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.schema_ is None:
        return {"type": form.type if form is not None else "text"}
    return {"type": form.type, "name": form.name, "schema": form.schema_, "strict": True}


def _echo_of_tool(tool: ResponseTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
