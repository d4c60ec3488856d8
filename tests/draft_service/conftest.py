"""A real draft service over real sockets, and a client that speaks its frames."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from draft_service.engine.engine import Engine
from draft_service.engine.load import EngineLimits
from draft_service.servicer import DraftServicer
from draft_service.worker import WorkerIdentity, WorkerServicer
from outrider.drafters.drafter import Drafter, DraftTerms, OpenProposal
from outrider.drafters.ngram import NgramDrafter
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving.channel import open_channel
from outrider.serving.server import Server
from outrider.serving.settings import ServingSettings
from outrider.tokens import ProposalNode
from outrider.v1 import draft_pb2, draft_pb2_grpc, worker_pb2_grpc
from outrider.wire import node_from_message, parameters_to_message, rule_to_number

TIMEOUT_S = 10.0
LIMITS = EngineLimits(max_sessions=64, max_cached_sessions=128, idle_ttl_s=60.0)


def terms(
    parameters: SamplingParameters | None = None,
    rule: AcceptanceRule = AcceptanceRule.COUPLED,
    stop_token_ids: Sequence[int] = (),
    prompt_len: int = 1,
) -> DraftTerms:
    """Returns terms with a seed."""
    return DraftTerms(parameters or SamplingParameters(seed=5), rule, prompt_len, frozenset(stop_token_ids))


def proposal(
    token_ids: Sequence[int], num: int = 4, session_id: str = "s", given: DraftTerms | None = None
) -> OpenProposal:
    """Returns a proposal to draft."""
    return OpenProposal(session_id, tuple(token_ids), given or terms(), num)


def draft(drafter: Drafter, *proposals: OpenProposal) -> list[tuple[int, ...]]:
    """Drafts the proposals to their ends, as the engine does; returns their token ids."""
    for _ in range(1000):
        active = [item for item in proposals if not item.complete]
        if not active:
            return [tuple(node.token_id for node in item.nodes) for item in proposals]
        drafter.step(active)
    raise AssertionError("the drafter does not come to an end")


def ngram_drafter() -> NgramDrafter:
    """Returns a lookup drafter with small n-grams."""
    return NgramDrafter(shortest=1, longest=3, budget_bytes=1 << 24, max_session_len=4096)


@dataclass
class RunningDraft:
    """A served drafter, with its parts at hand."""

    engine: Engine
    server: Server
    channel: grpc.aio.Channel

    @property
    def worker(self) -> "worker_pb2_grpc.WorkerServiceAsyncStub":
        """A stub of its WorkerService."""
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    def stream(self) -> "DraftClient":
        """Opens a stream."""
        return DraftClient(draft_pb2_grpc.DraftServiceStub(self.channel).Draft())

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something about the engine holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while not holds():
                await asyncio.sleep(0.005)


class DraftClient:
    """Speaks frames on one stream; whatever it reads for another session than the one awaited is kept for later."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call
        self._frames: defaultdict[int, list[draft_pb2.DraftResponseFrame]] = defaultdict(list)
        self._handles = itertools.count(1)

    async def send(self, *frames: draft_pb2.DraftRequestFrame) -> None:
        """Sends frames in one message."""
        await self.call.write(draft_pb2.DraftRequest(frames=frames))

    async def receive(self, handle: int) -> draft_pb2.DraftResponseFrame:
        """Returns the session's next frame."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self._frames[handle]:
                message = await self.call.read()
                assert message is not grpc.aio.EOF, "the stream ended"
                for frame in message.frames:
                    self._frames[frame.handle].append(frame)
        return self._frames[handle].pop(0)

    async def open(self, session_id: str = "s", **changes: object) -> tuple[int, draft_pb2.DraftResponseFrame]:
        """Opens a session; returns its handle and the answer."""
        handle = next(self._handles)
        await self.send(open_frame(handle, session_id, **changes))
        return handle, await self.receive(handle)

    async def refusal(self, handle: int) -> draft_pb2.WorkerRefusal:
        """Returns the session's next frame, which must be a refusal."""
        frame = await self.receive(handle)
        assert frame.WhichOneof("frame") == "refusal", frame
        return frame.refusal

    async def proposal(self, handle: int) -> list[ProposalNode]:
        """Returns the nodes of the session's next proposal, once it is complete."""
        nodes: list[ProposalNode] = []
        while True:
            frame = await self.receive(handle)
            assert frame.WhichOneof("frame") == "proposal", frame
            assert frame.proposal.first_node == len(nodes) + 1
            nodes += [node_from_message(node) for node in frame.proposal.nodes]
            if frame.proposal.complete:
                return nodes

    async def drafted(self, handle: int, *args: object, **kwargs: object) -> tuple[int, ...]:
        """Advances the session; returns the token ids proposed."""
        await self.send(advance_frame(handle, *args, **kwargs))  # type: ignore[arg-type]
        return tuple(node.token_id for node in await self.proposal(handle))


def open_frame(
    handle: int,
    session_id: str = "s",
    *,
    fencing_token: int = 1,
    parameters: SamplingParameters | None = None,
    rule: AcceptanceRule = AcceptanceRule.COUPLED,
    **fields: object,
) -> draft_pb2.DraftRequestFrame:
    """Returns a frame that opens a session."""
    message = draft_pb2.DraftOpen(
        session_id=session_id,
        fencing_token=fencing_token,
        parameters=parameters_to_message(parameters or SamplingParameters(seed=5)),
        acceptance_rule=rule_to_number(rule),
        **fields,  # type: ignore[arg-type]
    )
    return draft_pb2.DraftRequestFrame(handle=handle, open=message)


def advance_frame(
    handle: int,
    token_ids: Sequence[int],
    start: int = 0,
    *,
    num: int = 4,
    fencing_token: int = 1,
    base_len: int | None = None,
) -> draft_pb2.DraftRequestFrame:
    """Returns a frame that advances a session."""
    end = start + len(token_ids)
    message = draft_pb2.DraftAdvance(num_speculative_tokens=num)
    message.base.len = end if base_len is None else base_len
    message.base.fencing_token = fencing_token
    message.span.start = start
    message.span.token_ids.extend(token_ids)
    return draft_pb2.DraftRequestFrame(handle=handle, advance=message)


def close_frame(handle: int) -> draft_pb2.DraftRequestFrame:
    """Returns a frame that closes a session."""
    return draft_pb2.DraftRequestFrame(handle=handle, close=draft_pb2.DraftClose())


@asynccontextmanager
async def running_draft(
    drafter: Drafter, limits: EngineLimits = LIMITS, patience_s: float = 0.2
) -> AsyncIterator[RunningDraft]:
    """Serves a drafter on a socket of its own; its drain leaves open sessions `patience_s` seconds to end."""
    engine = Engine(drafter, limits)
    servicer = DraftServicer(engine.loop, drafter.info)
    server = Server(ServingSettings(drain_budget_s=5), name="draft", drain=lambda: servicer.drain(patience_s))
    server.register(draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer, "outrider.v1.DraftService")
    identity = WorkerIdentity("draft-0", limits.max_sessions, 1 << 20)
    worker = WorkerServicer(engine, drafter.info, identity)
    server.register(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "outrider.v1.WorkerService")
    engine.loop.start()
    channel = open_channel(await server.start())
    try:
        yield RunningDraft(engine, server, channel)
    finally:
        await channel.close()
        await server.stop()
        engine.loop.stop()


@pytest.fixture
async def ngram_draft() -> AsyncIterator[RunningDraft]:
    """A served lookup drafter."""
    async with running_draft(ngram_drafter()) as running:
        yield running
