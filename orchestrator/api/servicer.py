"""The servicer of GenerationService, the gRPC API for clients; see `service` for what it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from orchestrator.api.service import GenerationService
from outrider.errors import OutriderError
from outrider.serving.affinity import REPLICA
from outrider.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService; see proto/outrider/v1/generation.proto."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream a continuation; its initial metadata names this orchestrator, if it has a name."""
        replica = self._service.replica
        async with aclosing(self._service.generate(request, context.invocation_metadata())) as events:
            async for event in events:
                if replica:
                    await context.send_initial_metadata(((REPLICA, replica),))
                    replica = ""
                try:
                    yield event
                except OutriderError as error:
                    # The server's, where the client reads nothing: the request ends, and is counted, with it.
                    await events.athrow(error)

    async def CancelGeneration(
        self,
        request: generation_pb2.CancelGenerationRequest,
        context: grpc.aio.ServicerContext[
            generation_pb2.CancelGenerationRequest, generation_pb2.CancelGenerationResponse
        ],
    ) -> generation_pb2.CancelGenerationResponse:
        """Cancel a running request."""
        metadata = context.invocation_metadata()
        cancelled = await self._service.cancel(request.session_id, request.request_id, metadata)
        return generation_pb2.CancelGenerationResponse(cancelled=cancelled)

    async def GetSession(
        self,
        request: generation_pb2.GetSessionRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GetSessionRequest, generation_pb2.GetSessionResponse],
    ) -> generation_pb2.GetSessionResponse:
        """Return a session's record."""
        metadata = context.invocation_metadata()
        return await self._service.session(request.session_id, metadata, with_token_ids=request.with_token_ids)

    async def DeleteSession(
        self,
        request: generation_pb2.DeleteSessionRequest,
        context: grpc.aio.ServicerContext[generation_pb2.DeleteSessionRequest, generation_pb2.DeleteSessionResponse],
    ) -> generation_pb2.DeleteSessionResponse:
        """Delete a session."""
        await self._service.delete_session(request.session_id, context.invocation_metadata())
        return generation_pb2.DeleteSessionResponse()

    async def ListModels(
        self,
        request: generation_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[generation_pb2.ListModelsRequest, generation_pb2.ListModelsResponse],
    ) -> generation_pb2.ListModelsResponse:
        """Return the workers."""
        return self._service.models(context.invocation_metadata())
