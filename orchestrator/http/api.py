"""The routes of the HTTP API."""

from collections.abc import Callable
from typing import Final

from fastapi import Request
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

import outrider
from orchestrator.api.service import GenerationService
from orchestrator.http import chat, completions
from orchestrator.http.asgi import metadata
from orchestrator.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from orchestrator.http.errors import HttpError, as_http
from orchestrator.http.forms import Form
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.names import ServedNames
from orchestrator.http.ollama import OLLAMA_ROUTES, OllamaRoutes
from orchestrator.http.parsing import names_with
from orchestrator.http.requests import chat_prompt
from orchestrator.http.responses import RESPONSES_ROUTES, ResponsesRoutes
from orchestrator.http.routes import Json, RouteTable
from orchestrator.http.session_header import with_session
from orchestrator.http.structure import structure_of
from orchestrator.http.tools import tools_of
from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2


class Api(OllamaRoutes, ResponsesRoutes):
    """The routes.

    Args:
        service: generates.
        names: names of the model.
        is_ready: whether requests should come here.
        registry: metrics to expose at /metrics; None for none.
    """

    def __init__(
        self,
        service: GenerationService,
        names: ServedNames,
        is_ready: Callable[[], bool],
        registry: CollectorRegistry | None,
    ) -> None:
        super().__init__(service, names)
        self._is_ready = is_ready
        self._registry = registry

    async def chat(self, request: Request) -> Response:
        """Complete a conversation."""
        body = with_session(ChatBody.parse(request.state.body), request)
        model = await self._model(body.model)
        terms = chat.chat_terms(body, model)

        async def form(response_id: str, name: str, messages: list[generation_pb2.GenerateRequest]) -> Form:
            return chat.ChatForm(
                response_id,
                name,
                len(messages),
                TokenTexts(model.tokenizer),
                with_logprobs=bool(body.logprobs),
                with_usage=_with_usage(body),
                with_usage_so_far=_with_usage_so_far(body),
                is_parsed=terms.is_parsed,
                with_reasoning=body.include_reasoning is not False,
            )

        return await self._answer(request, body, terms.prompts, model, chat.PREFIX, terms.names, form)

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        body = with_session(CompletionBody.parse(request.state.body), request)
        model = await self._model(body.model)
        structure = structure_of(body)
        prompts = completions.prompts(body, structure)

        async def form(response_id: str, name: str, messages: list[generation_pb2.GenerateRequest]) -> Form:
            return completions.CompletionForm(
                response_id,
                name,
                completions.echoes(body, messages, model),
                prompts.n,
                TokenTexts(model.tokenizer),
                with_logprobs=body.logprobs is not None,
                with_usage=_with_usage(body),
                with_usage_so_far=_with_usage_so_far(body),
            )

        names = names_with(completions.NAMES, structure)
        return await self._answer(request, body, prompts, model, completions.PREFIX, names, form)

    async def models(self, request: Request) -> Response:
        """List the names of the model."""
        model = await self._service.model()
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._names.since,
                "owned_by": "outrider",
                "root": model.name,
                "parent": None,
                "max_model_len": model.max_session_len,
            }
            for name in self._names.of(model)
        ]
        return Json({"object": "list", "data": cards})

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt, or of messages."""
        body = TokenizeBody.parse(request.state.body)
        model = await self._model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("give exactly one of prompt and messages", "prompt")
        if body.messages is not None:
            tools = tools_of(body.tools, None, None)
            message = chat_prompt(body.messages, body.chat_template_kwargs, body.add_generation_prompt, tools=tools)
        else:
            message = generation_pb2.GenerateRequest(text=body.prompt or "")
        try:
            token_ids = await self._service.tokenize(message, model)
        except InvalidArgument as error:
            names = completions.NAMES if body.messages is None else chat.NAMES
            raise as_http(error, names) from None
        texts = TokenTexts(model.tokenizer)
        return Json(
            {
                "count": len(token_ids),
                "max_model_len": model.max_session_len,
                "tokens": token_ids,
                "token_strs": [texts.of(token_id) for token_id in token_ids] if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = DetokenizeBody.parse(request.state.body)
        model = await self._model(body.model)
        if model.tokenizer is None:
            raise InvalidArgument("the model has no tokenizer", "tokens")
        if len(body.tokens) > model.max_session_len or max(body.tokens, default=0) >= model.vocabulary_size:
            problem = f"may have {model.max_session_len} token ids, each below {model.vocabulary_size}"
            raise InvalidArgument(problem, "tokens")
        return Json({"prompt": model.tokenizer.decode(body.tokens)})

    async def delete_session(self, request: Request) -> Response:
        """Delete a session, its text and its KV caches."""
        session_id = request.path_params["session_id"]
        await self._service.delete_session(session_id, metadata(request.scope))
        return Json({"id": session_id, "object": "session.deleted", "deleted": True})

    async def health(self, request: Request) -> Response:
        """Return 200 where requests should come here, else 503."""
        return Response(status_code=200 if self._is_ready() else 503)

    async def version(self, request: Request) -> Response:
        """Return the version of the server."""
        return Json({"version": outrider.__version__})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of this process, where no tenants could learn of each other."""
        if self._registry is None:
            problem = "where there are tenants, metrics are at OUTRIDER_METRICS_ADDRESS only"
            raise HttpError(404, "NotFoundError", problem)
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def _with_usage(body: ChatBody | CompletionBody) -> bool:
    if body.stream_options is not None and not body.stream:
        problem = "stream_options goes with stream: true"
        raise HttpError(400, "BadRequestError", problem, "stream_options", "invalid_argument")
    return bool(body.stream_options and body.stream_options.include_usage)


def _with_usage_so_far(body: ChatBody | CompletionBody) -> bool:
    return _with_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)


ROUTES: Final[RouteTable] = (
    ("POST", "/v1/chat/completions", "chat", ChatBody),
    ("POST", "/v1/completions", "completions", CompletionBody),
    ("GET", "/v1/models", "models", None),
    ("DELETE", "/v1/sessions/{session_id}", "delete_session", None),
    ("POST", "/tokenize", "tokenize", TokenizeBody),
    ("POST", "/detokenize", "detokenize", DetokenizeBody),
    ("GET", "/health", "health", None),
    ("GET", "/version", "version", None),
    ("GET", "/metrics", "metrics", None),
    *RESPONSES_ROUTES,
    *OLLAMA_ROUTES,
)
"""Method, path, method of `Api` and body of each route."""
