"""TargetService and WorkerService of a target: frames to engine commands, in the event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator
from typing import Final

import grpc

import outrider
from outrider.errors import InvalidArgument, OutriderError
from outrider.lm.load_options import LoadedModel
from outrider.parameters import AcceptanceRule
from outrider.serving.frames import FRAMES_AT_ONCE, check_num_frames, checked_size
from outrider.serving.unexpected import UnexpectedErrors
from outrider.tokens import MAX_PROPOSAL_NODES
from outrider.v1 import target_pb2, target_pb2_grpc, worker_pb2, worker_pb2_grpc
from target_service.engine.engine import Engine
from target_service.engine.frames import GENTLE, command_from_frame, kind_of
from target_service.engine.stream import Stream
from target_service.settings import TargetSettings

_LOG: Final = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 1 << 20


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Feeds the engine with what callers send, and callers with what the engine emits.

    Args:
        engine: the engine.
        hand_over_after_s: seconds of a drain after which requests that still run are sent to another target.
    """

    def __init__(self, engine: Engine, hand_over_after_s: float = math.inf) -> None:
        self._engine = engine
        self._hand_over_after_s = hand_over_after_s
        self._streams: set[Stream] = set()
        self._unexpected = UnexpectedErrors()

    async def drain(self) -> None:
        """Refuses new sessions, waits until the running ones have ended or gone elsewhere, and ends the streams."""
        idle = asyncio.wrap_future(self._engine.drain())
        wait_s = None if self._hand_over_after_s == math.inf else self._hand_over_after_s
        if not (await asyncio.wait((idle,), timeout=wait_s))[0]:
            self._engine.submit(self._engine.hand_over)
        await idle
        await asyncio.to_thread(self._engine.flush_blocks)
        for stream in self._streams:
            stream.outbox.close()

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """Serves one stream until either side ends it."""
        stream = Stream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            async for message in stream.outbox.messages():
                yield message
        finally:
            reader.cancel()
            self._streams.discard(stream)
            # Without waiting for room: the sessions of a broken stream must not keep their places.
            self._engine.submit(functools.partial(self._engine.requests.close_stream, stream), stream)

    async def _read(self, requests: AsyncIterator[target_pb2.VerifyRequest], stream: Stream) -> None:
        try:
            async for request in requests:
                check_num_frames(request.frames)
                for number, frame in enumerate(request.frames, start=1):
                    await self._take(stream, frame)
                    if not number % FRAMES_AT_ONCE:
                        await asyncio.sleep(0)
        except OutriderError as error:
            # Bytes that are no message, above all.
            stream.outbox.close(error)
        except Exception as error:
            _LOG.warning("the stream could not be read", extra={"problem": type(error).__name__})
            stream.outbox.close(InvalidArgument("the stream could not be read", "request"))
        finally:
            stream.outbox.close()

    async def _take(self, stream: Stream, frame: target_pb2.VerifyRequestFrame) -> None:
        """Hands a frame to the engine; whatever is wrong with it ends one session at most."""
        engine, kind, num_bytes = self._engine, kind_of(frame), 0
        try:
            num_bytes = checked_size(frame)
            command = command_from_frame(engine.requests, stream, frame)
        except Exception as error:
            named = self._unexpected.named("the frame could not be read", error)
            command = functools.partial(engine.refuse, stream, frame.handle, kind, named)
        run = functools.partial(engine.run_frame, stream, frame.handle, kind, command)
        await engine.offer(stream, run, num_bytes, is_gentle=kind in GENTLE)


class TargetWorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Identity, load and tokenizer of this process."""

    def __init__(
        self, engine: Engine, loaded: LoadedModel, settings: TargetSettings, replica: str, incarnation: str
    ) -> None:
        self._engine = engine
        self._loaded = loaded
        self._settings = settings
        self._replica = replica
        self._incarnation = incarnation

    async def GetInfo(
        self,
        request: worker_pb2.GetInfoRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetInfoRequest, worker_pb2.GetInfoResponse],
    ) -> worker_pb2.GetInfoResponse:
        """Returns identity and limits."""
        info, settings = self._loaded.model.info, self._settings
        return worker_pb2.GetInfoResponse(
            role=worker_pb2.WORKER_ROLE_TARGET,
            replica=self._replica,
            incarnation=self._incarnation,
            model=info.name,
            model_fingerprint=info.fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            numerics=info.numerics,
            vocabulary_size=info.vocabulary_size,
            max_session_len=self._engine.max_len,
            max_sessions=settings.max_sessions,
            max_proposal_nodes=MAX_PROPOSAL_NODES,
            kv_budget_bytes=settings.kv_budget_bytes,
            eos_token_ids=info.eos_token_ids,
            version=outrider.__version__,
            acceptance_rules=[rule.value for rule in AcceptanceRule],
            num_layers=info.num_layers,
            hidden_size=info.hidden_size,
            weights_fingerprint=info.weights_fingerprint,
            drafter=self._engine.drafter,
        )

    async def GetLoad(
        self,
        request: worker_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetLoadRequest, worker_pb2.GetLoadResponse],
    ) -> worker_pb2.GetLoadResponse:
        """Returns how busy the engine is."""
        load, usage = self._engine.load, self._loaded.model.kv_usage
        return worker_pb2.GetLoadResponse(
            num_active_sessions=self._engine.num_requests,
            num_cached_sessions=load.num_cached_sessions,
            kv_used_bytes=usage.used_bytes,
            num_passes=load.num_passes,
            model_time_s=load.model_time_s,
            num_tokens=load.num_tokens,
            draining=self._engine.draining,
            num_stale_messages=load.num_stale_messages,
            num_invalid_proposals=load.num_invalid_proposals,
            kv_reusable_bytes=usage.num_reusable * usage.page_bytes,
            num_prefix_hit_tokens=usage.num_hit_tokens,
            num_evicted_pages=usage.num_evicted_pages,
            num_preemptions=load.num_preemptions,
            feature_bytes=load.feature_bytes,
            kv_blocks=self._kv_blocks(),
        )

    def _kv_blocks(self) -> worker_pb2.KVBlockLoad | None:
        if (blocks := self._engine.blocks) is None:
            return None
        counters = blocks.counters
        return worker_pb2.KVBlockLoad(
            num_written=counters.num_written,
            num_dropped=counters.num_dropped,
            num_restored=counters.num_restored,
            num_refused=counters.num_refused,
            num_failures=counters.num_failures,
            restore_bytes_per_s=blocks.costs.bytes_per_s,
            block_len=blocks.block_len,
        )

    async def GetTokenizer(
        self,
        request: worker_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetTokenizerRequest, worker_pb2.GetTokenizerResponse],
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        """Streams the tokenizer's files in parts; UNIMPLEMENTED where the model has none."""
        if self._loaded.tokenizer is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the model has no tokenizer")
        for name, content in self._loaded.tokenizer.files.items():
            for start in range(0, len(content), _CHUNK_BYTES):
                yield worker_pb2.GetTokenizerResponse(name=name, content=content[start : start + _CHUNK_BYTES])
