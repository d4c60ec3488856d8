"""What every fault is tried on: a stream through the whole stack, compared with plain decoding and with the log."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from outrider.client import GenerationRequest, OutriderClient, Speculation
from outrider.local.process import ServiceProcess
from outrider.parameters import SamplingParameters
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.faults.history import Record, check, read_log, watch
from tests.faults.stack import FaultStack

NUM_TOKENS = 120
_PLAIN: dict[tuple[object, ...], list[int]] = {}
SAMPLING: dict[str, float] = {}
"""Sampling parameters of all requests; greedy ones for targets whose noise no seed determines."""


def asking(seed: int = 9, num_tokens: int = NUM_TOKENS, **more: object) -> GenerationRequest:
    """A request whose text depends on its seed."""
    parameters = SamplingParameters(seed=seed, max_tokens=num_tokens, **SAMPLING)  # type: ignore[arg-type]
    return GenerationRequest(token_ids=(1, 2, 3), parameters=parameters, **more)  # type: ignore[arg-type]


def _key(request: GenerationRequest) -> tuple[object, ...]:
    parameters = request.parameters
    return (tuple(request.token_ids or ()), parameters.seed, parameters.max_tokens, parameters.temperature)


def plain(request: GenerationRequest) -> Sequence[int]:
    """Returns what plain decoding gave; see `learn`."""
    return _PLAIN[_key(request)]


async def learn(client: OutriderClient, *requests: GenerationRequest) -> None:
    """Has plain decoding's text of these requests made, while all is well."""
    new = [request for request in requests if _key(request) not in _PLAIN]
    asked = [replace(item, request_id="", session_id="", speculation=Speculation(disabled=True)) for item in new]
    generations = await asyncio.gather(*(client.complete(item, timeout_s=60) for item in asked))
    _PLAIN.update((_key(item), list(one.token_ids)) for item, one in zip(new, generations, strict=True))


@dataclass(slots=True)
class Scene:
    """The stack, whole, and a client of its orchestrators.

    Attributes:
        stack: everything that can be broken.
        client: goes to any orchestrator, and does not give up soon.
        note: keeps a figure with the test's result.
    """

    stack: FaultStack
    client: OutriderClient
    note: Callable[[str, object], None]

    async def learn(self, *requests: GenerationRequest) -> None:
        """Has plain decoding's text of these requests made, while all is well."""
        await learn(self.client, *requests)

    async def survive(
        self,
        strike: Callable[[], object],
        *,
        after: int = 30,
        request: GenerationRequest | None = None,
        client: OutriderClient | None = None,
        within_s: float = 20.0,
    ) -> Record:
        """Breaks something in the middle of a stream, which must go on as if nothing had happened.

        Returns:
            The stream as its client saw it; it and the log are plain decoding's text.
        """
        request = request or asking()
        await self.learn(request)
        record = await watch(client or self.client, request, after=after, strike=strike, timeout_s=within_s)
        self.note("longest_gap_s", round(record.longest_gap_s, 2))
        assert record.error is None, record.error
        await self.stack.heal()
        await read_log(self.client, record)
        check([record], plain)
        return record

    async def survive_beside(self, request: GenerationRequest) -> None:
        """Runs a request to its end while something is broken that must not concern it."""
        await self.learn(request)
        record = await watch(self.client, request, timeout_s=20)
        assert record.error is None, record.error
        check([record], plain)

    async def resumed(self, record: Record) -> Record:
        """Resumes a stream that broke off where its client stands; returns both parts as one."""
        assert record.error is not None
        request = replace(record.request, session_id=record.session_id, resume_offset=len(record.token_ids))
        rest = await watch(self.client, request, timeout_s=30)
        assert rest.error is None, rest.error
        whole = Record(record.request, record.deltas + rest.deltas, rest.num_terminal, session_id=record.session_id)
        await read_log(self.client, whole)
        check([whole], plain)
        return whole

    async def freed(self) -> None:
        """Returns once no worker has a session open, and no target holds KV cache; a draft's is evicted when needed."""
        async with asyncio.timeout(20):
            for process in (*self.stack.targets, *self.stack.drafts):
                is_target = process in self.stack.targets
                while (load := await load_of(process)).num_active_sessions or (is_target and load.kv_used_bytes):
                    await asyncio.sleep(0.02)

    async def serving(self) -> tuple[int, ServiceProcess]:
        """Returns the target that has a session now, and its number."""
        async with asyncio.timeout(5):
            while True:
                for number, process in enumerate(self.stack.targets):
                    if (await load_of(process)).num_active_sessions:
                        return number, process
                await asyncio.sleep(0.01)


async def load_of(process: ServiceProcess) -> worker_pb2.GetLoadResponse:
    """Asks a worker itself."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=5)
