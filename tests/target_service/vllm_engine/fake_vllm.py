"""vLLM's `LLMEngine` without a model, as far as the target's engine uses it, and a target on it behind a socket."""

import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc

from outrider.lm.pages import KVUsage
from outrider.v1 import target_pb2_grpc
from target_service.frontend import Frontend
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings
from target_service.vllm_engine.embedded import EmbeddedVllm
from target_service.vllm_engine.engine import VllmEngine
from target_service.vllm_engine.requests import VllmRequest
from target_service.vllm_engine.steps import Scheduled, StepSource
from tests.target_service.conversation import Caller

VOCABULARY, MAX_LEN, NUM_SPECULATIVE, BLOCK_LEN = 50, 200, 4, 4


def next_token(prompt: Sequence[int], output: Sequence[int], penalty: float = 0.0) -> int:
    """The model: it depends on the whole text and, with a penalty, on which tokens are output."""
    text = [*prompt, *output]
    token_id = zlib.crc32(bytes(text)) % (VOCABULARY - 1)
    return (token_id + len(set(output))) % (VOCABULARY - 1) if penalty else token_id


def continuation(prompt: Sequence[int], num: int, penalty: float = 0.0) -> list[int]:
    """The tokens that the model outputs after a prompt."""
    output: list[int] = []
    for _ in range(num):
        output.append(next_token(prompt, output, penalty))
    return output


@dataclass(eq=False)
class FakeRequest:
    """A request as vLLM's scheduler and its worker have it."""

    request_id: str
    key: str
    prompt: list[int]
    params: Any
    salt: str
    output: list[int] = field(default_factory=list)
    worker_output: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_running: bool = False

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output]


class FakeLlm:
    """Steps requests as vLLM does: chunked prompts, a prefix cache, verification, stops, preemption.

    Attributes:
        requests: those that have not ended.
        seen: all that were added.
        num_steps: steps so far.
        chunk_len: tokens of a prompt that a step runs.
        room: requests that run at once.
        fails_at: a token with which a step raises.
        ends_at: a token with which a request ends with an error.
    """

    def __init__(self, source: StepSource, chunk_len: int = 64, room: int = 16) -> None:
        self.source = source
        self.requests: dict[str, FakeRequest] = {}
        self.seen: list[FakeRequest] = []
        self.num_steps = 0
        self.chunk_len = chunk_len
        self.room = room
        self.fails_at: int | None = None
        self.ends_at: int | None = None
        self.preempts: Callable[[FakeRequest], bool] = lambda request: False
        self._cached: set[tuple[str, tuple[int, ...]]] = set()

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        if params.max_tokens < 1 or params.min_tokens > params.max_tokens:
            raise ValueError("max_tokens must be at least 1")
        assert prompt["type"] == "token"
        own = f"{request_id}-{len(self.seen):08x}"
        request = FakeRequest(own, request_id, list(prompt["prompt_token_ids"]), params, prompt.get("cache_salt", ""))
        self.requests[own] = request
        self.seen.append(request)
        return own

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        assert internal
        for request_id in request_ids:
            del self.requests[request_id]

    def set_output(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.requests[request_id].worker_output = list(token_ids)

    def step(self) -> list[Any]:
        self.num_steps += 1
        parts, num_preempted = self._schedule()
        self.source.record(parts, num_preempted)
        outputs = []
        for request_id, part in parts.items():
            request = self.requests[request_id]
            request.num_computed = part.start + part.num_rows - len(part.proposal)
            if self.fails_at in request.text:
                raise RuntimeError("the device is gone")
            if request.num_computed == len(request.text) and (output := self._sample(request, part.proposal)):
                outputs.append(output)
        return outputs

    def _schedule(self) -> tuple[dict[str, Scheduled], int]:
        parts, num_preempted = {}, 0
        for request in list(self.requests.values()):
            if not self.source.may_run(request):
                continue
            is_admitted = not request.is_running
            if request.is_running and self.preempts(request):
                request.is_running, request.num_computed = False, 0
                num_preempted += 1
                continue
            if is_admitted:
                if sum(other.is_running for other in self.requests.values()) >= self.room:
                    continue
                request.is_running, request.num_computed = True, self._find(request)
            length = len(request.text)
            line = tuple(self.source.lines.get(request.request_id, ())[:NUM_SPECULATIVE])
            proposal = line if length - request.num_computed == 1 and not is_admitted else ()
            num = min(length - request.num_computed, self.chunk_len) + len(proposal)
            parts[request.request_id] = Scheduled(request.num_computed, num, length, proposal, is_admitted)
        return parts, num_preempted

    def _sample(self, request: FakeRequest, proposal: Sequence[int]) -> Any:
        if request.request_id in self.source.earlier:
            request.worker_output = [VOCABULARY - 1]
            request.output = list(self.source.earlier.pop(request.request_id))
            self.source.resumed[request.request_id] = tuple(request.output)
            request.is_running, request.num_computed = False, 0
            return None
        params, new, reason = request.params, [], None
        for proposed in [*proposal, None]:
            new.append(next_token(request.prompt, [*request.worker_output, *new], params.presence_penalty))
            num_output = len(request.output) + len(new)
            if new[-1] in params.stop_token_ids and num_output >= params.min_tokens:
                reason = "stop"
            elif num_output >= params.max_tokens or len(request.text) + len(new) >= MAX_LEN:
                reason = "length"
            if reason is not None or new[-1] != proposed:
                break
        if self.ends_at in new:
            reason = "error"
        request.output += new
        request.worker_output += new
        request.num_computed = len(request.text) - 1
        for end in range(BLOCK_LEN, request.num_computed + 1, BLOCK_LEN):
            self._cached.add((request.salt, tuple(request.text[:end])))
        if reason is not None:
            del self.requests[request.request_id]
        logprobs = None
        if params.logprobs is not None:
            ranked = {0: SimpleNamespace(logprob=-0.5, rank=1), 1: SimpleNamespace(logprob=-1.5, rank=2)}
            logprobs = [{**ranked, token: ranked.get(token, SimpleNamespace(logprob=-3.0, rank=9))} for token in new]
        completion = SimpleNamespace(token_ids=new, logprobs=logprobs, finish_reason=reason)
        return SimpleNamespace(request_id=request.key, outputs=[completion], finished=reason is not None)

    def _find(self, request: FakeRequest) -> int:
        """Returns the tokens that the prefix cache has, all but the last one of the text at most."""
        text = request.text
        ends = range(BLOCK_LEN, len(text), BLOCK_LEN)
        return max((end for end in ends if (request.salt, tuple(text[:end])) in self._cached), default=0)


def sampling_params(**arguments: Any) -> SimpleNamespace:
    """`vllm.SamplingParams` with its defaults."""
    defaults = {
        "min_tokens": 0,
        "stop_token_ids": [],
        "presence_penalty": 0.0,
        "logprobs": None,
        "structured_outputs": None,
    }
    return SimpleNamespace(**{**defaults, **arguments})


@dataclass(frozen=True)
class Served:
    engine: VllmEngine
    llm: FakeLlm
    caller: Caller
    frontend: Frontend[VllmRequest]
    failed: list[str]


@asynccontextmanager
async def served(
    *, num_speculative: int = NUM_SPECULATIVE, chunk_len: int = 64, room: int = 16, **settings: Any
) -> AsyncIterator[Served]:
    """A target on a fake vLLM, and a caller of it."""
    source, failed = StepSource(), []
    llm = FakeLlm(source, chunk_len, room)
    embedded = EmbeddedVllm(
        llm=llm,
        sampling_params=sampling_params,
        set_output=llm.set_output,
        kv_usage=lambda: KVUsage(BLOCK_LEN, 100, 64, sum(item.is_running for item in llm.requests.values()), 0, 0, 0),
        vocabulary_size=VOCABULARY,
        max_len=MAX_LEN,
        max_rows=64,
        num_speculative_tokens=num_speculative,
    )
    engine = VllmEngine(embedded, source, TargetSettings(engine="vllm", **settings))  # type: ignore[arg-type]
    frontend = Frontend(engine, 16, lambda: failed.append("failed"))
    frontend.start()
    server = grpc.aio.server()
    servicer = TargetServicer(frontend, MAX_LEN)
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        caller = Caller(channel)
        yield Served(engine, llm, caller, frontend, failed)
        await caller.end()
    await server.stop(0)
    frontend.loop.stop()
