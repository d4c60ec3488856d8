"""A target and a draft without models, over real sockets: the next token depends on the position and the one before.

Each remembers what it was sent, and can be told to refuse, to stay silent, to miss its cache or to break its streams.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from outrider import wire
from outrider.errors import Fenced, KVCacheMiss, OutriderError
from outrider.serving.frames import FrameOutbox
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, tokens_pb2, worker_pb2, worker_pb2_grpc

VOCABULARY_SIZE = 997
MAX_SESSION_LEN = 512
EOS = 2

NextToken = Callable[[list[int]], int]


def counting(tokens: list[int]) -> int:
    """The scripted target's next token, from 100 to 996: a function of position and last token, never a stop token."""
    return 100 + (7 * len(tokens) + 31 * tokens[-1]) % 897


def continuation(tokens: list[int], num: int, next_token: NextToken = counting) -> list[int]:
    """The output of plain decoding."""
    whole = list(tokens)
    for _ in range(num):
        whole.append(next_token(whole))
    return whole[len(tokens) :]


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """The part that both workers share: GetInfo, and one outbox for each stream.

    Attributes:
        num_fetches: times that its tokenizer was asked for.
        is_tokenizer_silent: whether it does not send it yet.
    """

    def __init__(self, name: str, role: worker_pb2.WorkerRole.ValueType) -> None:
        self.info = worker_pb2.GetInfoResponse(
            role=role,
            replica=name,
            incarnation=f"{name}-1",
            model="scripted",
            model_fingerprint="m",
            weights_fingerprint="w",
            tokenizer_fingerprint="t",
            vocabulary_size=VOCABULARY_SIZE,
            max_session_len=MAX_SESSION_LEN,
            eos_token_ids=[EOS],
            drafter="model" if role == worker_pb2.WORKER_ROLE_DRAFT else "",
        )
        self.load = worker_pb2.GetLoadResponse()
        self.files: dict[str, bytes] = {}
        self.frames: list[Any] = []
        self.refusals: list[OutriderError] = []
        self.answers_load = True
        self.num_fetches = 0
        self.is_tokenizer_silent = False
        self.changed = asyncio.Condition()
        self._outboxes: list[FrameOutbox[Any, Any]] = []
        self._server: grpc.aio.Server | None = None
        self.address = "127.0.0.1:0"
        self.credentials: grpc.ServerCredentials | None = None

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return self.info

    async def GetLoad(
        self, request: worker_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetLoadResponse:
        if not self.answers_load:
            await asyncio.Event().wait()
        return self.load

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        self.num_fetches += 1
        while self.is_tokenizer_silent:
            await asyncio.sleep(0.01)
        if not self.files:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no tokenizer")
        for name, content in self.files.items():
            for start in range(0, len(content), 1000):
                yield worker_pb2.GetTokenizerResponse(name=name, content=content[start : start + 1000])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    async def start(self) -> None:
        """Serves, at the address it had before if there was one."""
        self._server = grpc.aio.server(
            # Whoever pings each second is let, as by a real worker.
            options=[("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 250)]
        )
        self._register(self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        if self.credentials is None:
            port = self._server.add_insecure_port(self.address)
        else:
            port = self._server.add_secure_port(self.address, self.credentials)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def die(self) -> None:
        """Breaks every stream and forgets every session."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)
        self._forget()

    async def saw(self, kind: str, num: int = 1) -> list[Any]:
        """Returns the frames of a kind once there are so many of them."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.of(kind)) >= num)
        return self.of(kind)

    def of(self, kind: str) -> list[Any]:
        """Returns the content of the frames of a kind that came so far."""
        return [getattr(frame, kind) for frame in self.frames if frame.WhichOneof("frame") == kind]

    async def _serve(
        self, requests: AsyncIterator[Any], message: Callable[[list[Any]], Any], take: Callable[..., None]
    ) -> AsyncIterator[Any]:
        outbox: FrameOutbox[Any, Any] = FrameOutbox(message)
        self._outboxes.append(outbox)
        reader = asyncio.create_task(self._read(requests, outbox, take))
        try:
            async for response in outbox.messages():
                yield response
        finally:
            reader.cancel()
            self._outboxes.remove(outbox)

    async def _read(
        self, requests: AsyncIterator[Any], outbox: FrameOutbox[Any, Any], take: Callable[..., None]
    ) -> None:
        async for request in requests:
            for frame in request.frames:
                self.frames.append(frame)
                take(outbox, frame)
            async with self.changed:
                self.changed.notify_all()
        outbox.close()

    def break_streams(self) -> None:
        """Ends every stream; the process lives on."""
        for outbox in self._outboxes:
            outbox.close()
        self._forget()

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError


@dataclass
class _Request:
    """A session that is open at the scripted target."""

    outbox: FrameOutbox[Any, Any]
    handle: int
    open: target_pb2.VerifyOpen
    window_end: int
    speculates: int
    waits: bool = False
    proposals: dict[int, list[int]] = field(default_factory=dict)
    drafters: dict[int, list[str]] = field(default_factory=dict)
    started: bool = False
    features: tuple[bool, int] = (False, 0)


class ScriptedTarget(ScriptedWorker, target_pb2_grpc.TargetServiceServicer):
    """Verifies chains against `next_token`; waits for a whole proposal for as long as it takes.

    Attributes:
        opened: what requests were opened with.
        run_len: positions it may still output; None for any number. More are allowed by `allow`.
        misses: how many spans it refuses with KV_CACHE_MISS{0}.
        out_of_step: how many verdicts it gives for an earlier base than they have.
        is_silent: answers nothing, not even `open`.
    """

    def __init__(self, name: str = "t0", next_token: NextToken = counting) -> None:
        super().__init__(name, worker_pb2.WORKER_ROLE_TARGET)
        self.next_token = next_token
        self.caches: dict[str, list[int]] = {}
        self.opened: list[target_pb2.VerifyOpen] = []
        self.run_len: int | None = None
        self.misses = 0
        self.is_plain = False
        self.out_of_step = 0
        self.is_silent = False
        self._requests: dict[tuple[int, int], _Request] = {}

    def allow(self, num: int | None) -> None:
        """Lets it output so many tokens more; None for any number."""
        self.run_len = num
        for request in list(self._requests.values()):
            self._go(request)

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        async for response in self._serve(
            request_iterator, lambda frames: target_pb2.VerifyResponse(frames=frames), self._take
        ):
            yield response

    def _register(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    def _forget(self) -> None:
        self._requests.clear()
        self.caches.clear()

    def _take(self, outbox: FrameOutbox[Any, Any], frame: target_pb2.VerifyRequestFrame) -> None:
        if self.is_silent:
            return
        key = (id(outbox), frame.handle)
        kind = frame.WhichOneof("frame")
        if kind == "open":
            self._open(outbox, frame, key)
        elif request := self._requests.get(key):
            if kind == "span":
                self._span(request, frame.span)
            elif kind == "proposal":
                nodes = request.proposals.setdefault(frame.proposal.base.len, [])
                nodes += [node.token_id for node in frame.proposal.nodes]
                names = request.drafters.setdefault(frame.proposal.base.len, [])
                names += [node.drafter for node in frame.proposal.nodes]
                if frame.proposal.complete:
                    nodes.append(VOCABULARY_SIZE)
            elif kind == "features":
                request.features = (len(frame.features.layers) > 0, frame.features.start)
                self._send_features(request, len(self.caches[request.open.session_id]) - 1)
            elif kind == "window":
                request.window_end = frame.window.window_end
            elif kind == "speculation":
                request.speculates = frame.speculation.num_speculative_tokens
            elif kind == "close":
                del self.caches[request.open.session_id][frame.close.committed_len :]
                del self._requests[key]
                return
            self._go(request)

    def _open(self, outbox: FrameOutbox[Any, Any], frame: target_pb2.VerifyRequestFrame, key: tuple[int, int]) -> None:
        if self.refusals:
            self._refuse(outbox, frame.handle, self.refusals.pop(0))
            return
        message = frame.open
        self.opened.append(message)
        for older, request in list(self._requests.items()):
            if request.open.session_id == message.session_id:
                del self._requests[older]
                self._refuse(request.outbox, request.handle, Fenced("a newer lease is here"))
        settings = message.speculation
        num = 0 if settings.own_draft else settings.num_speculative_tokens
        self._requests[key] = _Request(outbox, frame.handle, message, message.window_end, num, num > 0)
        cached_len = min(len(self.caches.setdefault(message.session_id, [])), message.committed_len - 1)
        opened = target_pb2.VerifyOpened(cached_len=cached_len, is_plain=self.is_plain)
        outbox.put(target_pb2.VerifyResponseFrame(handle=frame.handle, opened=opened))

    def _span(self, request: _Request, span: tokens_pb2.TokenSpan) -> None:
        cache = self.caches[request.open.session_id]
        if self.misses:
            self.misses -= 1
            cache.clear()
        if span.start > len(cache):
            self._refuse(request.outbox, request.handle, KVCacheMiss("evicted", len(cache)))
            return
        cache[span.start :] = span.token_ids
        request.started = len(cache) == request.open.committed_len

    @staticmethod
    def _refuse(outbox: FrameOutbox[Any, Any], handle: int, error: OutriderError) -> None:
        outbox.put(target_pb2.VerifyResponseFrame(handle=handle, refusal=wire.refusal_to_message(error)))

    def _go(self, request: _Request) -> None:
        while request.started and self._has_room(request) and self._is_ready(request):
            self._pass(request)

    def _has_room(self, request: _Request) -> bool:
        room = request.window_end - len(self.caches[request.open.session_id])
        return room > 0 and (self.run_len is None or self.run_len > 0)

    def _is_ready(self, request: _Request) -> bool:
        proposed = request.proposals.get(len(self.caches[request.open.session_id]), [])
        return not (request.waits and request.speculates) or VOCABULARY_SIZE in proposed

    def _pass(self, request: _Request) -> None:
        message, cache = request.open, self.caches[request.open.session_id]
        base = len(cache)
        proposed = [token for token in request.proposals.pop(base, []) if token != VOCABULARY_SIZE]
        names = request.drafters.pop(base, [])
        most = message.prompt_len + message.parameters.max_tokens - base
        most = min(most, request.window_end - base, self.run_len if self.run_len is not None else MAX_SESSION_LEN)
        output: list[int] = []
        finish = tokens_pb2.FINISH_REASON_UNSPECIFIED
        num_accepted = 0
        for drafted in [*proposed, None][:most]:
            token = self.next_token(cache)
            cache.append(token)
            output.append(token)
            num_accepted += token == drafted
            if token in message.stop_token_ids:
                finish = tokens_pb2.FINISH_REASON_STOP
            elif len(cache) - message.prompt_len >= message.parameters.max_tokens:
                finish = tokens_pb2.FINISH_REASON_LENGTH
            if finish or token != drafted:
                break
        if self.run_len is not None:
            self.run_len -= len(output)
        request.started = not finish
        # Decided once for each round, and sent with its verdict; a later change counts from the next round on.
        request.waits = request.speculates > 0
        verdict = target_pb2.Verdict(
            base=tokens_pb2.Base(len=base, fencing_token=message.fencing_token),
            token_ids=output,
            origins=[tokens_pb2.TOKEN_ORIGIN_ACCEPTED] * num_accepted
            + [tokens_pb2.TOKEN_ORIGIN_BONUS] * (len(output) - num_accepted),
            num_draft_tokens=len(proposed),
            num_accepted_tokens=num_accepted,
            num_nodes=len(proposed),
            finish_reason=finish,
            num_speculative_tokens=99 * request.waits,
        )
        if any(names[:num_accepted]):
            verdict.drafters.extend(names[:num_accepted] + [""] * (len(output) - num_accepted))
        if self.out_of_step and base > message.committed_len:
            self.out_of_step -= 1
            verdict.base.len -= 1
        self._send_features(request, len(cache) - 1)
        request.outbox.put(target_pb2.VerifyResponseFrame(handle=request.handle, verdict=verdict))

    @staticmethod
    def _send_features(request: _Request, end: int) -> None:
        """Sends one bfloat16 number of every position that is cached and was not sent yet."""
        wanted, start = request.features
        if wanted and start < end:
            request.features = (True, end)
            features = tokens_pb2.Features(start=start, data=bytes(2 * (end - start)))
            request.outbox.put(target_pb2.VerifyResponseFrame(handle=request.handle, features=features))


class ScriptedDraft(ScriptedWorker, draft_pb2_grpc.DraftServiceServicer):
    """Proposes tokens of `next_token`; the default is the target's own, so everything is accepted.

    Attributes:
        is_silent: takes everything and answers `open` only.
        misses: how many advances it refuses with KV_CACHE_MISS{0}.
        features_lost: how many times it loses all features when it is to propose.
        drafters: where it combines several: names of them, which propose the tokens at 0, 1, ... in turn.
        keeps_features: whether it has what it was given; without, it asks again and again.

    With `feature_layers` in its `info` it proposes only what it has the features for, and asks for those it lacks.
    """

    def __init__(self, name: str = "d0", next_token: NextToken = counting) -> None:
        super().__init__(name, worker_pb2.WORKER_ROLE_DRAFT)
        self.next_token = next_token
        self.is_silent = False
        self.misses = 0
        self.features_lost = 0
        self.keeps_features = True
        self.drafters: list[str] = []
        self._sessions: dict[tuple[int, int], list[int]] = {}
        self._features: dict[tuple[int, int], int] = {}
        self._num_frames: dict[tuple[int, int], int] = {}
        self._waiting: dict[tuple[int, int], draft_pb2.DraftRequestFrame] = {}

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        async for response in self._serve(
            request_iterator, lambda frames: draft_pb2.DraftResponse(frames=frames), self._take
        ):
            yield response

    @property
    def num_open(self) -> int:
        return len(self._sessions)

    def _register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    def _forget(self) -> None:
        self._sessions.clear()

    def _take(self, outbox: FrameOutbox[Any, Any], frame: draft_pb2.DraftRequestFrame) -> None:
        key = (id(outbox), frame.handle)
        answer: draft_pb2.DraftResponseFrame | None = None
        match frame.WhichOneof("frame"):
            case "open":
                answer = self._opened(key, frame.handle)
            case "advance" if key in self._sessions and not self.is_silent:
                answer = self._missing(key, frame) or self._proposal(self._sessions[key], frame)
            case "features":
                answer = self._given(key, frame.features)
            case "close":
                self._sessions.pop(key, None)
        if answer is not None:
            outbox.put(answer)

    def _missing(self, key: tuple[int, int], frame: draft_pb2.DraftRequestFrame) -> draft_pb2.DraftResponseFrame | None:
        if not self.info.feature_layers:
            return None
        if self.features_lost:
            self.features_lost -= 1
            self._features[key] = 0
        known = self._features.setdefault(key, 0)
        if known >= frame.advance.base.len - 1:
            return None
        self._waiting[key] = frame
        missing = draft_pb2.FeaturesMissing(start=known, num_frames=self._num_frames.get(key, 0))
        return draft_pb2.DraftResponseFrame(handle=frame.handle, features_missing=missing)

    def _given(self, key: tuple[int, int], features: tokens_pb2.Features) -> draft_pb2.DraftResponseFrame | None:
        self._num_frames[key] = self._num_frames.get(key, 0) + 1
        if not self.keeps_features:
            return self._missing(key, self._waiting[key]) if key in self._waiting else None
        known, end = self._features.get(key, 0), features.start + len(features.data) // 2
        assert features.start <= known, "features leave a gap"
        self._features[key] = max(known, end)
        waiting = self._waiting.get(key)
        if waiting is None or self._features[key] < waiting.advance.base.len - 1:
            return None
        del self._waiting[key]
        return self._proposal(self._sessions[key], waiting)

    def _opened(self, key: tuple[int, int], handle: int) -> draft_pb2.DraftResponseFrame:
        if self.refusals:
            refusal = wire.refusal_to_message(self.refusals.pop(0))
            return draft_pb2.DraftResponseFrame(handle=handle, refusal=refusal)
        self._sessions[key] = []
        return draft_pb2.DraftResponseFrame(handle=handle, opened=draft_pb2.DraftOpened(cached_len=0))

    def _proposal(self, tokens: list[int], frame: draft_pb2.DraftRequestFrame) -> draft_pb2.DraftResponseFrame:
        advance = frame.advance
        if self.misses or advance.span.start > len(tokens):
            self.misses = max(0, self.misses - 1)
            tokens.clear()
            refusal = wire.refusal_to_message(KVCacheMiss("evicted", 0))
            return draft_pb2.DraftResponseFrame(handle=frame.handle, refusal=refusal)
        tokens[advance.span.start :] = advance.span.token_ids
        chain = continuation(tokens, advance.num_speculative_tokens, self.next_token)
        nodes = [
            tokens_pb2.ProposalNode(
                parent=parent,
                token_id=token_id,
                kind=tokens_pb2.NODE_KIND_DRAFTED,
                drafter=self.drafters[(len(tokens) + parent) % len(self.drafters)] if self.drafters else "",
            )
            for parent, token_id in enumerate(chain)
        ]
        proposal = tokens_pb2.Proposal(base=advance.base, first_node=1, nodes=nodes, complete=True)
        return draft_pb2.DraftResponseFrame(handle=frame.handle, proposal=proposal)
