"""Stub workers without models, which answer immediately, to measure the time outside of workers."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import grpc

from outrider.parameters import REPLAYABLE_RULES
from outrider.serving.frames import FrameOutbox
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, tokens_pb2, worker_pb2, worker_pb2_grpc

NUM_SPECULATIVE_TOKENS: Final = 4
ROUND_LEN: Final = 4
"""Output tokens per round: all drafted ones except the last, and one token of the target's own."""
VOCABULARY_SIZE: Final = 1 << 16
_MAX_SESSION_LEN: Final = 1 << 20
_TOKEN_ID: Final = 7
_WRONG_TOKEN_ID: Final = 1 << 30

_Take = Callable[[FrameOutbox[Any, Any], Any], None]


class StubWorker(worker_pb2_grpc.WorkerServiceServicer):
    """The WorkerService of a stub worker; its sessions are served on streams of frames."""

    def __init__(self, role: worker_pb2.WorkerRole.ValueType, name: str) -> None:
        self.files: Mapping[str, bytes] = {}
        self._info = worker_pb2.GetInfoResponse(
            role=role,
            replica=name,
            incarnation=name,
            model="idle",
            model_fingerprint="idle",
            weights_fingerprint="idle",
            tokenizer_fingerprint="idle",
            numerics="none invariant",
            vocabulary_size=VOCABULARY_SIZE,
            max_session_len=_MAX_SESSION_LEN,
            acceptance_rules=[rule.value for rule in REPLAYABLE_RULES],
            drafter="model" if role == worker_pb2.WORKER_ROLE_DRAFT else "",
        )

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        """Return the worker's identity."""
        return self._info

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Any) -> worker_pb2.GetLoadResponse:
        """Return an empty load."""
        return worker_pb2.GetLoadResponse()

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        """Return the tokenizer's files; refuse where there are none, and clients send token ids."""
        if not self.files:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no tokenizer")
        for name, content in self.files.items():
            yield worker_pb2.GetTokenizerResponse(name=name, content=content)

    async def _serve(
        self, requests: AsyncIterator[Any], message: Callable[[list[Any]], Any], take: _Take
    ) -> AsyncIterator[Any]:
        outbox: FrameOutbox[Any, Any] = FrameOutbox(message)
        reader = asyncio.create_task(self._read(requests, outbox, take))
        try:
            async for response in outbox.messages():
                yield response
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Any], outbox: FrameOutbox[Any, Any], take: _Take) -> None:
        async for request in requests:
            for frame in request.frames:
                take(outbox, frame)
        outbox.close()


@dataclass(slots=True, eq=False)
class _Request:
    outbox: FrameOutbox[Any, Any]
    handle: int
    fencing_token: int
    base_len: int
    end_len: int
    window_end: int
    speculates: bool = False
    number: int = 0
    has_proposal: bool = False
    is_paced: bool = False
    is_over: bool = False
    verdict_s: float = 0.0


class StubTarget(StubWorker, target_pb2_grpc.TargetServiceServicer):
    """A stub target that sends each verdict when the proposal for it is complete, at most every `pace_s`.

    Attributes:
        num_rounds: number of verdicts on proposals.
        waits_s: seconds from each verdict to the complete proposal for its base.
        verdict_times_s: time of each verdict, by the first token of the session's prompt and the session length after
            it; readers remove their entries.
        pace_s: minimum seconds between the verdicts of a session.
    """

    def __init__(self) -> None:
        super().__init__(worker_pb2.WORKER_ROLE_TARGET, "target")
        self.num_rounds = 0
        self.waits_s: list[float] = []
        self.verdict_times_s: dict[tuple[int, int], float] = {}
        self.pace_s = 0.0
        self._random = random.Random(0)
        self._requests: dict[tuple[int, int], _Request] = {}

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """Serve one stream."""
        async for response in self._serve(
            request_iterator, lambda frames: target_pb2.VerifyResponse(frames=frames), self._take
        ):
            yield response

    @property
    def num_speculating(self) -> int:
        """Number of sessions with speculation."""
        return sum(request.speculates for request in self._requests.values())

    def _take(self, outbox: FrameOutbox[Any, Any], frame: target_pb2.VerifyRequestFrame) -> None:
        key = id(outbox), frame.handle
        kind = frame.WhichOneof("frame")
        if kind == "open":
            self._requests[key] = self._opened(outbox, frame)
            return
        request = self._requests.get(key)
        if request is None:
            return
        match kind:
            case "span":
                request.number = frame.span.token_ids[0]
                self._send_verdict(request, 1)
            case "speculation":
                request.speculates = frame.speculation.num_speculative_tokens > 0
                if request.speculates and not request.has_proposal:
                    self._send_verdict(request, 1)
            case "window":
                request.window_end = frame.window.window_end
            case "proposal":
                self._receive_proposal(request, frame.proposal)
            case "close":
                request.is_over = True
                del self._requests[key]
        self._continue(request)

    @staticmethod
    def _opened(outbox: FrameOutbox[Any, Any], frame: target_pb2.VerifyRequestFrame) -> _Request:
        message = frame.open
        opened = target_pb2.VerifyOpened(cached_len=0)
        outbox.put(target_pb2.VerifyResponseFrame(handle=frame.handle, opened=opened))
        return _Request(
            outbox,
            frame.handle,
            message.fencing_token,
            message.committed_len,
            message.prompt_len + message.parameters.max_tokens,
            message.window_end,
            message.speculation.num_speculative_tokens > 0,
        )

    def _receive_proposal(self, request: _Request, proposal: tokens_pb2.Proposal) -> None:
        if proposal.base.len == request.base_len and proposal.complete:
            request.has_proposal = True
            self.waits_s.append(time.perf_counter() - request.verdict_s)

    def _continue(self, request: _Request) -> None:
        if request.is_over or not request.has_proposal or request.base_len + ROUND_LEN > request.window_end:
            return
        request.has_proposal = False
        # A random first delay, so that the verdicts of sessions are spread over time.
        pace_s = self.pace_s * (1.0 if request.is_paced else self._random.random())
        request.is_paced = True
        left_s = request.verdict_s + pace_s - time.perf_counter()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._send_verdict, request, ROUND_LEN)
        else:
            self._send_verdict(request, ROUND_LEN)

    def _send_verdict(self, request: _Request, num: int) -> None:
        if request.is_over:
            return
        num = min(num, request.end_len - request.base_len)
        is_last = request.base_len + num == request.end_len
        verdict = target_pb2.Verdict(
            base=tokens_pb2.Base(len=request.base_len, fencing_token=request.fencing_token),
            token_ids=[_TOKEN_ID] * num,
            origins=[tokens_pb2.TOKEN_ORIGIN_ACCEPTED] * (num - 1) + [tokens_pb2.TOKEN_ORIGIN_RECOVERED],
            num_draft_tokens=NUM_SPECULATIVE_TOKENS if num > 1 else 0,
            num_accepted_tokens=num - 1,
            num_nodes=NUM_SPECULATIVE_TOKENS if num > 1 else 0,
            finish_reason=tokens_pb2.FINISH_REASON_LENGTH if is_last else tokens_pb2.FINISH_REASON_UNSPECIFIED,
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS * request.speculates,
        )
        request.base_len += num
        request.is_over = is_last
        request.verdict_s = time.perf_counter()
        self.num_rounds += num > 1
        self.verdict_times_s[request.number, request.base_len] = request.verdict_s
        request.outbox.put(target_pb2.VerifyResponseFrame(handle=request.handle, verdict=verdict))


class StubDraft(StubWorker, draft_pb2_grpc.DraftServiceServicer):
    """A stub draft that always proposes the same tokens."""

    def __init__(self) -> None:
        super().__init__(worker_pb2.WORKER_ROLE_DRAFT, "draft")

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """Serve one stream."""
        async for response in self._serve(
            request_iterator, lambda frames: draft_pb2.DraftResponse(frames=frames), self._take
        ):
            yield response

    @property
    def _token_id(self) -> int:
        return _TOKEN_ID

    def _take(self, outbox: FrameOutbox[Any, Any], frame: draft_pb2.DraftRequestFrame) -> None:
        match frame.WhichOneof("frame"):
            case "open":
                outbox.put(draft_pb2.DraftResponseFrame(handle=frame.handle, opened=draft_pb2.DraftOpened()))
            case "advance":
                num, token_id = frame.advance.num_speculative_tokens, self._token_id
                kind = tokens_pb2.NODE_KIND_DRAFTED
                nodes = [tokens_pb2.ProposalNode(parent=at, token_id=token_id, kind=kind) for at in range(num)]
                proposal = tokens_pb2.Proposal(base=frame.advance.base, first_node=1, nodes=nodes, complete=True)
                outbox.put(draft_pb2.DraftResponseFrame(handle=frame.handle, proposal=proposal))


class WrongDraft(StubDraft):
    """A draft of any tokenizer that proposes a token id outside the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self._info.tokenizer_fingerprint = ""

    @property
    def _token_id(self) -> int:
        return _WRONG_TOKEN_ID


@asynccontextmanager
async def stub_workers(files: Mapping[str, bytes] = MappingProxyType({})) -> AsyncIterator[tuple[StubTarget, str, str]]:
    """Serve a stub target and a stub draft in this event loop; yield the target, its address and the draft's.

    Args:
        files: of the target's tokenizer; none for a target without text.
    """
    target, draft = StubTarget(), StubDraft()
    target.files = files
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(target, server)
    other = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, other)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(draft, other)
    ports = [item.add_insecure_port("127.0.0.1:0") for item in (server, other)]
    await server.start()
    await other.start()
    try:
        yield target, f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
    finally:
        await server.stop(0)
        await other.stop(0)
