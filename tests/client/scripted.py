"""A GenerationService that plays scripts over real sockets, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from outrider.errors import OutriderError, SessionNotFound
from outrider.serving.status import grpc_status_from_error
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import tokens_pb2, worker_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

WORDS = ("The", " cat", " sat", " on", " the", " mat", ".", " It", " was", " warm")
HANG = "hang"

Step = pb.GenerateResponse | Exception | str


def accepted(session_id: str = "s", seed: int = 7) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        accepted=pb.Accepted(request_id="r", session_id=session_id, seed=seed, num_prompt_tokens=3)
    )


def delta(offset: int, num: int = 1) -> pb.GenerateResponse:
    """The tokens at offset, offset + 1, ...: token id n stands for WORDS[n]; the first of several were accepted."""
    token_ids = range(offset, offset + num)
    origins = [tokens_pb2.TOKEN_ORIGIN_ACCEPTED] * (num - 1) + [tokens_pb2.TOKEN_ORIGIN_BONUS]
    text = "".join(WORDS[token_id] for token_id in token_ids)
    return pb.GenerateResponse(delta=pb.Delta(offset=offset, token_ids=token_ids, text=text, origins=origins))


def finished(
    num: int = len(WORDS), reason: tokens_pb2.FinishReason.ValueType = tokens_pb2.FINISH_REASON_LENGTH
) -> pb.GenerateResponse:
    statistics = pb.GenerationStatistics(
        num_drafts=4,
        num_draft_tokens=8,
        num_accepted_tokens=6,
        num_accepted_tokens_per_pos=[4, 2],
        num_target_passes=4,
        time_to_first_token_s=0.5,
        tokens_per_second=20.0,
    )
    return pb.GenerateResponse(finished=pb.Finished(finish_reason=reason, num_output_tokens=num, statistics=statistics))


def whole(start: int = 0) -> list[Step]:
    """A generation from an offset to its end, two tokens a delta."""
    return [
        accepted(),
        *(delta(offset, min(2, len(WORDS) - offset)) for offset in range(start, len(WORDS), 2)),
        finished(),
    ]


@dataclass
class ScriptedService(GenerationServiceServicer):
    """Plays one script per Generate call; the last one again and again.

    `HANG` in a script waits until the call is cancelled or CancelGeneration comes.
    """

    scripts: Sequence[Sequence[Step]] = field(default_factory=lambda: [whole()])
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        for step in script:
            if isinstance(step, OutriderError):
                await context.abort_with_status(grpc_status_from_error(step))
            elif isinstance(step, Exception):
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(step))
            elif isinstance(step, str):
                await self._hang()
            else:
                yield step

    async def _hang(self) -> None:
        self.hangs.set()
        try:
            await self.cancelled.wait()
        finally:
            self.left.set()

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelGenerationResponse:
        self.cancelled.set()
        return pb.CancelGenerationResponse(cancelled=True)

    async def GetSession(
        self, request: pb.GetSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetSessionResponse:
        if request.session_id != "s":
            await context.abort_with_status(grpc_status_from_error(SessionNotFound(f"no session {request.session_id}")))
        return pb.GetSessionResponse(session_id="s", committed_len=13)

    async def DeleteSession(
        self, request: pb.DeleteSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteSessionResponse:
        self.deleted.append(request.session_id)
        return pb.DeleteSessionResponse()

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        info = worker_pb2.GetInfoResponse(
            role=worker_pb2.WORKER_ROLE_TARGET, replica="t0", model="toy", vocabulary_size=16
        )
        workers = [
            pb.WorkerStatus(address="127.0.0.1:1", info=info, in_rotation=True),
            pb.WorkerStatus(address="127.0.0.1:2", in_rotation=False, reason="TOKENIZER_MISMATCH: aa and bb"),
        ]
        return pb.ListModelsResponse(workers=workers, default_num_speculative_tokens=5)


@asynccontextmanager
async def serving(*services: ScriptedService) -> AsyncIterator[tuple[str, ...]]:
    """Serves each on a free port; gives the addresses."""
    servers = []
    for service in services:
        server = grpc.aio.server()
        add_GenerationServiceServicer_to_server(service, server)
        service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    try:
        yield tuple(service.address for service in services)
    finally:
        for server in servers:
            await server.stop(None)
