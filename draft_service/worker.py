"""WorkerService of a draft: its identity, its limits and its load."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

import outrider
from draft_service.engine.engine import Engine
from outrider.drafters.drafter import DrafterInfo
from outrider.parameters import REPLAYABLE_RULES
from outrider.tokens import MAX_PROPOSAL_NODES
from outrider.v1 import worker_pb2, worker_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The fields of GetInfo that the drafter does not have: the replica's name and its limits."""

    replica: str
    max_sessions: int
    kv_budget_bytes: int


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves identity and load. A draft has no tokenizer to serve: the orchestrator uses the target's."""

    def __init__(self, engine: Engine, info: DrafterInfo, identity: WorkerIdentity) -> None:
        self._engine = engine
        self._info = worker_pb2.GetInfoResponse(
            role=worker_pb2.WORKER_ROLE_DRAFT,
            replica=identity.replica,
            incarnation=secrets.token_hex(8),
            model=info.model,
            model_fingerprint=info.model_fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            numerics=info.numerics,
            vocabulary_size=info.vocabulary_size,
            max_session_len=info.max_session_len,
            max_sessions=identity.max_sessions,
            max_proposal_nodes=MAX_PROPOSAL_NODES,
            kv_budget_bytes=identity.kv_budget_bytes,
            eos_token_ids=info.eos_token_ids,
            drafter=info.drafter,
            version=outrider.__version__,
            acceptance_rules=[rule.value for rule in REPLAYABLE_RULES],
            feature_layers=info.feature_layers,
            hidden_size=info.hidden_size,
            target_fingerprint=info.target_fingerprint,
        )

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: _Context) -> worker_pb2.GetInfoResponse:
        """Return model, fingerprints and limits."""
        return self._info

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: _Context) -> worker_pb2.GetLoadResponse:
        """Return the load of the engine."""
        load = self._engine.load
        return worker_pb2.GetLoadResponse(
            num_active_sessions=load.num_active_sessions,
            num_cached_sessions=load.num_cached_sessions,
            kv_used_bytes=load.kv_used_bytes,
            num_passes=load.num_passes,
            model_time_s=load.model_time_s,
            num_tokens=load.num_tokens,
            draining=self._engine.loop.is_draining,
            num_stale_messages=load.num_stale_messages,
        )

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        """End with UNIMPLEMENTED."""
        # A loop over nothing makes this a generator, which a streaming call has to be.
        nothing: tuple[worker_pb2.GetTokenizerResponse, ...] = ()
        for response in nothing:
            yield response
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a draft has no tokenizer")
