"""Another engine behind the cut: streams, handles, fencing, admission, refusals and drains stay the frontend's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from outrider.errors import InvalidArgument, KVCacheMiss, OutriderError
from outrider.parameters import FinishReason, SamplingParameters
from outrider.serving.session_failures import EngineFailed
from outrider.tokens import Base, ProposalNode, TokenOrigin
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc
from target_service.engine.commands import Handle, Open, Propose, RequestCommand, Span, Window
from target_service.engine.counters import EngineLoad
from target_service.engine.interface import EngineHost
from target_service.engine.results import Opened, RoundMetrics, RoundResult, Verdict
from target_service.frontend import Frontend
from target_service.servicer import TargetServicer
from tests.target_service.conversation import Caller

PROMPT = [1, 2, 3]
GREEDY = SamplingParameters(temperature=0, max_tokens=6)
_METRICS = RoundMetrics(0.001, 0.0, 0.0, 0.0, 0, False, 0, 0, 0)


@dataclass(eq=False)
class CountedRequest:
    handle: Handle
    session_id: str
    fencing_token: int
    max_tokens: int
    window_end: int
    token_ids: list[int] = field(default_factory=list)
    num_output: int = 0

    @property
    def log_fields(self) -> dict[str, str]:
        return {"session": self.session_id}


class CountingEngine:
    """A `TargetEngine` without a model: each token is one more than the last, a session with 13 in it fails."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        self.requests: list[CountedRequest] = []
        self.closed: list[tuple[str, int | None, str]] = []
        self.distrusted: list[str] = []
        self.forgotten: list[str] = []
        self.num_proposals = self.num_flushed = self.num_probes = 0
        self.is_broken = False

    def attach(self, host: EngineHost[CountedRequest]) -> None:
        self.host = host

    def start(self) -> None:
        self.load.num_tokens = 0

    def check(self, command: Open) -> None:
        if command.parameters.logprobs is not None:
            raise InvalidArgument("are not supported", "logprobs")

    def open(self, command: Open) -> CountedRequest:
        request = CountedRequest(
            command.handle,
            command.session_id,
            command.fencing_token,
            command.parameters.max_tokens,
            command.window_end,
        )
        self.requests.append(request)
        command.handle.stream.post(Opened(command.handle.number, 0))
        return request

    def apply(self, request: CountedRequest, command: RequestCommand) -> None:
        match command:
            case Span(_, span):
                if span.start > len(request.token_ids):
                    raise KVCacheMiss("too far ahead", len(request.token_ids))
                request.token_ids[span.start :] = span.token_ids
            case Window(_, _, window_end):
                request.window_end = window_end
            case Propose(_, part, _):
                self.num_proposals += 1
                if part.nodes and part.nodes[0].token_id == 9:
                    raise ValueError("the nodes are no tree")

    def refuse_proposal(self, request: CountedRequest, error: OutriderError) -> None:
        self.load.num_invalid_proposals += 1

    def refuse_features(self, request: CountedRequest, error: OutriderError) -> None:
        raise AssertionError("no features are requested here")

    def close(self, request: CountedRequest, committed_len: int | None, error: str = "") -> None:
        self.requests.remove(request)
        self.closed.append((request.session_id, committed_len, error))

    def distrust(self, request: CountedRequest) -> None:
        self.distrusted.append(request.session_id)

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    def flush(self) -> None:
        self.num_flushed += 1

    @property
    def step_s(self) -> float:
        return 0.0

    def expire(self) -> None:
        pass

    def step(self) -> bool:
        ready = [request for request in self.requests if self._is_ready(request)]
        self.host.apply_gentle()
        for request in ready:
            if 13 in request.token_ids:
                self.host.fail_request(request, ZeroDivisionError())
            else:
                self._output(request)
        for stream in {request.handle.stream for request in ready}:
            stream.flush()
        return bool(ready)

    def publish(self) -> None:
        self.load.num_active_sessions = len(self.requests)

    def wait_s(self) -> float | None:
        return None

    def probe(self) -> None:
        self.num_probes += 1
        if self.is_broken:
            raise EngineFailed("the device is gone")

    def _is_ready(self, request: CountedRequest) -> bool:
        length = len(request.token_ids)
        return 0 < length < request.window_end and request.num_output < request.max_tokens

    def _output(self, request: CountedRequest) -> None:
        base = Base(len(request.token_ids), request.fencing_token)
        request.token_ids.append(request.token_ids[-1] + 1)
        request.num_output += 1
        reason = FinishReason.LENGTH if request.num_output == request.max_tokens else None
        result = RoundResult((request.token_ids[-1],), (TokenOrigin.BONUS,), (), (), 0, 0, 0, reason)
        request.handle.stream.hold(Verdict(request.handle.number, base, result, _METRICS))


Served = tuple[CountingEngine, Frontend[CountedRequest], TargetServicer, Caller]


@asynccontextmanager
async def served(max_sessions: int = 8, hand_over_after_s: float = 0.05) -> AsyncIterator[Served]:
    engine = CountingEngine()
    frontend = Frontend(engine, max_sessions)
    frontend.start()
    servicer = TargetServicer(frontend, 1000, hand_over_after_s)
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        caller = Caller(channel)
        yield engine, frontend, servicer, caller
        await caller.end()
    await server.stop(0)
    frontend.loop.stop()


async def refusal(caller: Caller, handle: int) -> tuple[str, str]:
    """Returns reason and field of the next refusal of a handle."""
    while (frame := await caller.receive(handle)).WhichOneof("frame") != "refusal":
        pass
    return frame.refusal.reason, frame.refusal.metadata["field"]


async def test_another_engine_generates_through_the_servicer() -> None:
    async with served() as (engine, _, _, caller):
        outputs = await asyncio.gather(*(caller.plain(handle, [handle], GREEDY) for handle in (20, 30)))
        assert outputs == [[*range(21, 27)], [*range(31, 37)]]
        await caller.send(5, forget={"session_id": "session-20"})
        await caller.span(1, 0, [1])
        async with asyncio.timeout(10):
            while not engine.load.num_stale_messages:
                await asyncio.sleep(0.002)
        assert sorted(engine.closed) == [("session-20", 7, ""), ("session-30", 7, "")]
        assert engine.forgotten == ["session-20"]


async def test_a_newer_request_fences_the_older_one_off_before_it_is_opened() -> None:
    async with served() as (engine, _, _, caller):
        await caller.open(1, PROMPT, GREEDY, session="s", fencing_token=5)
        assert (await caller.open(2, PROMPT, GREEDY, session="s", fencing_token=4)).refusal.reason == "FENCED"
        logprobs = SamplingParameters(temperature=0, logprobs=1)
        refused = await caller.open(3, PROMPT, logprobs, session="s", fencing_token=9)
        assert refused.refusal.metadata["field"] == "logprobs"
        assert not engine.closed, "a request that cannot be opened takes no session over"
        opened = await caller.open(4, PROMPT, GREEDY, session="s", fencing_token=6)
        assert opened.WhichOneof("frame") == "opened"
        assert await refusal(caller, 1) == ("FENCED", "")
        assert engine.closed == [("s", None, "FENCED")]


async def test_handles_and_admission_are_the_frontends() -> None:
    async with served(max_sessions=2) as (engine, frontend, _, caller):
        for handle in (1, 2):
            await caller.open(handle, PROMPT, GREEDY)
        assert (await caller.open(3, PROMPT, GREEDY)).refusal.reason == "OVERLOADED"
        await caller.open(2, PROMPT, GREEDY, session="other")
        assert [item[0] for item in engine.closed] == ["session-2"], "a handle that is opened twice is closed"
        await caller.span(1, 5, PROMPT)
        assert await refusal(caller, 1) == ("KV_CACHE_MISS", "")
        await caller.span(1, 0, PROMPT)
        assert [verdict.token_ids[0] async for verdict in caller.verdicts(1)] == [4, 5, 6, 7, 8, 9]
        assert frontend.num_sessions == 1


async def test_proposals_of_another_lease_or_without_a_tree_end_nothing() -> None:
    async with served() as (engine, _, _, caller):
        await caller.open(1, PROMPT, GREEDY, fencing_token=5, window=0)
        await caller.propose(1, Base(3, 4), [])
        await caller.propose(1, Base(3, 5), [ProposalNode(0, 9)])
        await caller.span(1, 0, PROMPT)
        await caller.send(1, window=pb.VerifyWindow(committed_len=3, window_end=100))
        assert len([verdict async for verdict in caller.verdicts(1)]) == 6
        assert (engine.load.num_stale_messages, engine.load.num_invalid_proposals, engine.num_proposals) == (1, 1, 1)


async def test_a_request_that_fails_is_probed_for_distrusted_and_refused_alone() -> None:
    async with served() as (engine, frontend, _, caller):
        await caller.open(1, [13], GREEDY)
        await caller.span(1, 0, [13])
        assert await refusal(caller, 1) == ("REQUEST_FAILED", "")
        assert await caller.plain(2, [20], GREEDY) == [*range(21, 27)]
        assert engine.num_probes == 1
        assert engine.distrusted == ["session-1"]
        assert frontend.loop.is_alive


async def test_no_request_is_refused_for_an_engine_that_fails() -> None:
    async with served() as (engine, frontend, _, caller):
        engine.is_broken = True
        await caller.open(1, [13], GREEDY)
        await caller.span(1, 0, [13])
        async with asyncio.timeout(10):
            while frontend.loop.is_alive:
                await asyncio.sleep(0.002)
        assert caller.num_waiting(1) == 0


@pytest.mark.parametrize("ends_by_itself", [True, False])
async def test_a_drain_waits_for_requests_then_hands_them_over(ends_by_itself: bool) -> None:
    async with served(hand_over_after_s=10 if ends_by_itself else 0.05) as (engine, frontend, servicer, caller):
        await caller.open(1, PROMPT, GREEDY)
        draining = asyncio.create_task(servicer.drain())
        async with asyncio.timeout(10):
            while not frontend.loop.is_draining:
                await asyncio.sleep(0.002)
        assert (await caller.open(2, PROMPT, GREEDY)).refusal.reason == "DRAINING"
        assert not draining.done()
        if ends_by_itself:
            await caller.send(1, close=pb.VerifyClose(committed_len=3))
        else:
            assert await refusal(caller, 1) == ("DRAINING", "")
        await asyncio.wait_for(draining, 10)
        assert engine.num_flushed == (1 if ends_by_itself else 2)


async def test_the_end_of_a_stream_closes_its_requests_only() -> None:
    async with served() as (engine, frontend, _, caller):
        other = Caller(caller.channel)
        for each in (caller, other):
            await each.open(1, PROMPT, GREEDY, session=f"s{id(each)}")
        await other.end()
        async with asyncio.timeout(10):
            while not engine.closed:
                await asyncio.sleep(0.002)
        assert engine.closed == [(f"s{id(other)}", None, "STREAM_ENDED")] and frontend.num_sessions == 1
