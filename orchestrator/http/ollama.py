"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/version, and the probe at /."""

import time
from collections.abc import Mapping
from typing import Any, Final

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

import outrider
from orchestrator.http.asgi import metadata
from orchestrator.http.errors import HttpError
from orchestrator.http.held_output import held_output
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.messages import ChatMessage
from orchestrator.http.ollama_bodies import (
    PARAMETER_NAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from orchestrator.http.ollama_forms import OllamaChatForm, OllamaForm, OllamaGenerateForm, rfc3339
from orchestrator.http.ollama_messages import chat_messages_of
from orchestrator.http.parsing import Said, names_with, parse
from orchestrator.http.playground import accepts_page, page
from orchestrator.http.requests import chat_prompt
from orchestrator.http.routes import Json, Routes, RouteTable
from orchestrator.http.session_header import with_session
from orchestrator.http.tools import Tools, tools_of
from orchestrator.workers.model import Model
from outrider.serving.interceptor import Metadata
from outrider.v1 import generation_pb2, tokens_pb2, worker_pb2

OLLAMA_ROUTES: Final[RouteTable] = (
    ("POST", "/api/chat", "ollama_chat", OllamaChatBody),
    ("POST", "/api/generate", "ollama_generate", OllamaGenerateBody),
    ("POST", "/api/show", "ollama_show", OllamaShowBody),
    ("GET", "/api/tags", "ollama_tags", None),
    ("GET", "/api/version", "ollama_version", None),
    ("GET", "/", "root", None),
    ("HEAD", "/", "root", None),
)
_LATEST: Final = ":latest"
_OF_MESSAGES: Final = ("chat", "role", "prompt", "tool_calls", "arguments", "tool_call_id", "reasoning")
_CHAT_NAMES: Final = {
    **PARAMETER_NAMES,
    **dict.fromkeys(_OF_MESSAGES, "messages"),
    "template_variables": "think",
}
_GENERATE_NAMES: Final = {**PARAMETER_NAMES, "chat": "prompt", "text": "prompt", "template_variables": "think"}
_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ARCHITECTURE: Final = "outrider"
_DEFAULTS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Sampling parameters that generation_config.json may set -> Ollama's names of them."""


class OllamaRoutes(Routes):
    """The routes of Ollama's API."""

    async def ollama_chat(self, request: Request) -> Response:
        """Complete a conversation, as Ollama's API does."""
        body = with_session(OllamaChatBody.parse(request.state.body), request)
        model = await self._ollama_model(body.model)
        if not body.messages:
            return self._loaded(body, model, OllamaChatForm)
        tools = tools_of(body.tools, None, None)
        messages = chat_messages_of(body.messages)
        prompt = chat_prompt(messages, body.variables, continues=bool(body.session_id), tools=tools)
        return await self._ollama_answer(request, body, prompt, tools, model, _CHAT_NAMES, OllamaChatForm)

    async def ollama_generate(self, request: Request) -> Response:
        """Complete a prompt, as Ollama's API does."""
        body = with_session(OllamaGenerateBody.parse(request.state.body), request)
        model = await self._ollama_model(body.model)
        prompt = _prompt_of(body, model)
        if not body.prompt:
            return self._loaded(body, model, OllamaGenerateForm)
        tools = tools_of(None, None, None)
        return await self._ollama_answer(request, body, prompt, tools, model, _GENERATE_NAMES, OllamaGenerateForm)

    async def ollama_tags(self, request: Request) -> Response:
        """List the names of the model, as Ollama's API does."""
        model = await self._service.model()
        details = self._details(metadata(request.scope))
        names = [name if ":" in name.rpartition("/")[2] else name + _LATEST for name in self._names.of(model)]
        return Json(
            {
                "models": [
                    {
                        "name": name,
                        "model": name,
                        "modified_at": rfc3339(self._names.since),
                        "size": 0,
                        "digest": model.fingerprint,
                        "details": details,
                    }
                    for name in names
                ]
            }
        )

    async def ollama_show(self, request: Request) -> Response:
        """Describe the model, as Ollama's API does."""
        body = OllamaShowBody.parse(request.state.body)
        if body.model is not None and body.name is not None and body.model != body.name:
            raise HttpError(400, "BadRequestError", "model and name differ: give one of them", "name")
        model = await self._ollama_model(body.name if body.model is None else body.model)
        return Json(
            {
                "modelfile": "",
                "license": "",
                "parameters": _parameters_of(model.defaults),
                "template": (model.tokenizer.chat_template if model.tokenizer else None) or "",
                "details": self._details(metadata(request.scope)),
                "model_info": {
                    "general.architecture": _ARCHITECTURE,
                    "general.basename": self._names.of(model)[0],
                    f"{_ARCHITECTURE}.context_length": model.max_session_len,
                    f"{_ARCHITECTURE}.vocab_size": model.vocabulary_size,
                },
                "capabilities": _capabilities(model),
                "modified_at": rfc3339(self._names.since),
            }
        )

    async def ollama_version(self, request: Request) -> Response:
        """Return the version of the server, as Ollama's API does."""
        return Json({"version": outrider.__version__})

    async def root(self, request: Request) -> Response:
        """Return the playground to browsers, and a line of text to clients of Ollama, which probe it."""
        if accepts_page(request):
            return page(request)
        return PlainTextResponse("Outrider is running", headers={"vary": "Accept"})

    async def _ollama_model(self, name: str | None) -> Model:
        """Return the model; raise `HttpError` for a name that it does not have, with or without ":latest"."""
        model = await self._service.model()
        try:
            self._names.check(name, model, suffix=_LATEST)
        except HttpError as error:
            problem = f"model {str(name)[:200]!r} not found"
            raise HttpError(error.status, error.kind, problem, error.parameter, error.code) from None
        return model

    async def _ollama_answer(
        self,
        request: Request,
        body: OllamaBody,
        prompt: generation_pb2.GenerateRequest,
        tools: Tools,
        model: Model,
        names: Mapping[str, str],
        kind: type[OllamaForm],
    ) -> Response:
        is_parsed = prompt.HasField("chat") and parse(prompt, tools, model)
        # A raw prompt is the caller's whole prompt, and its output is text.
        structure = tools.constrained(body.structure, model) if prompt.HasField("chat") else body.structure

        async def form(response_id: str, name: str, messages: list[generation_pb2.GenerateRequest]) -> OllamaForm:
            # A call goes out whole, so one that began before a break is told from its beginning.
            call = metadata(request.scope)
            held = await held_output(messages[0], model, self._service, call) if tools.are_called else None
            texts = TokenTexts(model.tokenizer)
            return kind(name, texts, with_logprobs=bool(body.logprobs), is_parsed=is_parsed, held=held)

        prompts = body.prompts(prompt, model, structure)
        return await self._answer(request, body, prompts, model, "", names_with(names, structure), form)

    def _loaded(self, body: OllamaBody, model: Model, kind: type[OllamaForm]) -> Response:
        """Return the answer to a request without a prompt: the model is loaded."""
        # Its options are checked as if there were something to generate.
        body.prompts(generation_pb2.GenerateRequest(), model)
        name = body.model or self._names.of(model)[0]
        content = kind(name, TokenTexts(None), with_logprobs=False).content(Said())
        return Json({"model": name, "created_at": rfc3339(time.time()), **content, "done": True, "done_reason": "load"})

    def _details(self, call: Metadata) -> dict[str, Any]:
        """Return what is known of the model's weights."""
        targets = [
            status.info
            for status in self._service.models(call).workers
            if status.in_rotation and status.info.role == worker_pb2.WORKER_ROLE_TARGET
        ]
        words = targets[0].numerics.split() if targets else []
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": _ARCHITECTURE,
            "families": [_ARCHITECTURE],
            "parameter_size": "",
            "quantization_level": next((_DTYPES[word] for word in words if word in _DTYPES), ""),
        }


def _prompt_of(body: OllamaGenerateBody, model: Model) -> generation_pb2.GenerateRequest:
    """Return the prompt of a body; where a model has no chat template, it is the text as it is, as in Ollama."""
    has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
    if body.raw or not has_template:
        if body.system:
            reason = "raw: true" if body.raw else "a model without a chat template"
            raise HttpError(400, "BadRequestError", f"system does not go with {reason}", "system", "invalid_argument")
        return generation_pb2.GenerateRequest(text=body.prompt or "")
    messages = [ChatMessage(role="system", content=body.system)] if body.system else []
    messages.append(ChatMessage(role="user", content=body.prompt or ""))
    return chat_prompt(messages, body.variables, continues=bool(body.session_id))


def _capabilities(model: Model) -> list[str]:
    """Return what the model can do, in Ollama's words."""
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        return ["completion"]
    thinks = model.tokenizer.output_format.template.reasoning is not None
    return ["completion", "tools", *(["thinking"] if thinks else [])]


def _parameters_of(defaults: tokens_pb2.SamplingParameters) -> str:
    """Return the model's own sampling parameters as lines of Ollama's model files."""
    given = {field.name: value for field, value in defaults.ListFields()}
    return "\n".join(f"{own} {given[name]:g}" for name, own in _DEFAULTS.items() if name in given)
