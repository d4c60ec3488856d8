"""WorkerService of a target: its identity, its limits, its load and its tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

import outrider
from outrider.tokens import MAX_PROPOSAL_NODES
from outrider.v1 import tokens_pb2, worker_pb2, worker_pb2_grpc
from target_service.engine.identity import EngineUsage, TargetIdentity
from target_service.frontend import Frontend

_CHUNK_BYTES: Final = 1 << 20


class TargetWorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves identity, load and tokenizer of this process.

    Args:
        engine: its engine.
        frontend: of the engine.
        identity: of its model.
        max_sessions: requests that it runs at once, at most.
        replica: name of this replica.
        incarnation: id of this process.
    """

    def __init__(
        self,
        engine: EngineUsage,
        frontend: Frontend[Any],
        identity: TargetIdentity,
        max_sessions: int,
        replica: str,
        incarnation: str,
    ) -> None:
        self._engine = engine
        self._frontend = frontend
        self._identity = identity
        self._max_sessions = max_sessions
        self._replica = replica
        self._incarnation = incarnation

    async def GetInfo(
        self,
        request: worker_pb2.GetInfoRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetInfoRequest, worker_pb2.GetInfoResponse],
    ) -> worker_pb2.GetInfoResponse:
        """Return identity and limits."""
        identity = self._identity
        return worker_pb2.GetInfoResponse(
            role=worker_pb2.WORKER_ROLE_TARGET,
            replica=self._replica,
            incarnation=self._incarnation,
            model=identity.model,
            model_fingerprint=identity.model_fingerprint,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            numerics=identity.numerics,
            vocabulary_size=identity.vocabulary_size,
            max_session_len=identity.max_session_len,
            max_sessions=self._max_sessions,
            max_proposal_nodes=MAX_PROPOSAL_NODES,
            kv_budget_bytes=identity.kv_budget_bytes,
            eos_token_ids=identity.eos_token_ids,
            version=outrider.__version__,
            acceptance_rules=[rule.value for rule in identity.acceptance_rules],
            num_layers=identity.num_layers,
            hidden_size=identity.hidden_size,
            weights_fingerprint=identity.weights_fingerprint,
            drafter=identity.drafter,
            default_parameters=self._default_parameters(),
            grammar_library=identity.grammar_library,
        )

    def _default_parameters(self) -> tokens_pb2.SamplingParameters:
        message = tokens_pb2.SamplingParameters()
        for name, value in self._identity.default_parameters.items():
            setattr(message, name, value)
        return message

    async def GetLoad(
        self,
        request: worker_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetLoadRequest, worker_pb2.GetLoadResponse],
    ) -> worker_pb2.GetLoadResponse:
        """Return the load of the engine."""
        load, usage = self._engine.load, self._engine.kv_usage
        return worker_pb2.GetLoadResponse(
            num_active_sessions=self._frontend.num_sessions,
            num_cached_sessions=load.num_cached_sessions,
            kv_used_bytes=usage.used_bytes,
            num_passes=load.num_passes,
            model_time_s=load.model_time_s,
            num_tokens=load.num_tokens,
            draining=self._frontend.loop.is_draining,
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
        if (blocks := self._engine.block_usage) is None:
            return None
        counters = blocks.counters
        return worker_pb2.KVBlockLoad(
            num_written=counters.num_written,
            num_dropped=counters.num_dropped,
            num_restored=counters.num_restored,
            num_refused=counters.num_refused,
            num_failures=counters.num_failures,
            restore_bytes_per_s=blocks.restore_bytes_per_s,
            block_len=blocks.block_len,
        )

    async def GetTokenizer(
        self,
        request: worker_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetTokenizerRequest, worker_pb2.GetTokenizerResponse],
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        """Stream the tokenizer's files in parts; end with UNIMPLEMENTED where the model has none."""
        if not self._identity.tokenizer_files:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the model has no tokenizer")
        for name, content in self._identity.tokenizer_files.items():
            for start in range(0, len(content), _CHUNK_BYTES):
                yield worker_pb2.GetTokenizerResponse(name=name, content=content[start : start + _CHUNK_BYTES])
