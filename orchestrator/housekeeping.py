"""What one orchestrator does for all: has workers forget sessions that are there no more.

A session that has expired, or was deleted while some worker was out of reach, is gone from Redis; but workers go on to
keep its tokens and its KV cache until they need the room. The orchestrator that is elected asks them now and then which
idle sessions they have, looks them up, and has those forgotten that are gone.

Nothing depends on it: a session that is forgotten by mistake is computed again.
"""

import asyncio
import logging
import socket
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from orchestrator.election.election import Election, parse_lease
from orchestrator.election.redis_lock import RedisElection
from orchestrator.links import WorkerLink
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.replicas import Replicas
from orchestrator.settings import OrchestratorSettings
from orchestrator.store import SessionStore
from outrider.errors import OutriderError
from outrider.serving.status import peer_errors
from outrider.v1 import worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from outrider.v1.worker_pb2_grpc import WorkerServiceAsyncStub

_LOG: Final = logging.getLogger(__name__)
_KEY: Final = "outrider:housekeeping"
_WORKER_S: Final = 30.0
_CALL_S: Final = 10.0
_PAUSE_S: Final = 10.0


class Housekeeper:
    """Stands for election, and keeps house while elected.

    Args:
        store: the sessions.
        replicas: the workers.
        settings: where the election is held, and how often there is something to do.
        metrics: are told of it.
    """

    def __init__(
        self, store: SessionStore, replicas: Replicas, settings: OrchestratorSettings, metrics: OrchestratorMetrics
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._settings = settings
        self._metrics = metrics
        self._standing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Stands for election from now on. Raises `InvalidArgument` where there is no cluster to hold it."""
        election = await self._election()
        self._standing = asyncio.create_task(self._stand(election))

    async def stop(self) -> None:
        """Gives up, so that another one may be elected at once."""
        if self._standing is not None:
            self._standing.cancel()
            await asyncio.gather(self._standing, return_exceptions=True)

    async def round(self) -> int:
        """Has all workers forget what is gone; returns how many sessions that were, each counted once a worker."""
        links = [link for link in (*self._replicas.targets, *self._replicas.drafts) if link.is_up]
        return sum(await asyncio.gather(*map(self._visit, links)))

    async def _election(self) -> Election:
        if (lease := parse_lease(self._settings.housekeeping_lease)) is None:
            return RedisElection(self._store.client, _KEY)
        # Here, because importing it takes a second that nobody else should wait.
        from orchestrator.election.lease import LeaseElection

        cluster = self._replicas.cluster
        namespace, name = lease
        identity = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        return LeaseElection(await cluster.api(), namespace or cluster.namespace, name, identity)

    async def _stand(self, election: Election) -> None:
        while True:
            try:
                await election.run(self._keep_house)
            except Exception:
                # Nobody waits for this task; were it to end, no one would notice that nobody keeps house.
                _LOG.exception("the election failed, going on")
            await asyncio.sleep(_PAUSE_S)

    async def _keep_house(self) -> None:
        self._metrics.is_housekeeper.set(1)
        try:
            while True:
                try:
                    await self.round()
                except Exception:
                    # The next round may do better; an end of the work would look like an election lost.
                    _LOG.exception("a round of housekeeping failed")
                await asyncio.sleep(self._settings.housekeeping_interval_s)
        finally:
            self._metrics.is_housekeeper.set(0)

    async def _visit(self, link: WorkerLink) -> int:
        """Has one worker forget what is gone; one that does not answer, or is too old to know how, is left alone."""
        num_forgotten = 0
        error: BaseException | None = None
        try:
            async with asyncio.timeout(_WORKER_S):
                with peer_errors():
                    worker = WorkerServiceStub(link.channel)
                    call = worker.ListIdleSessions(worker_pb2.ListIdleSessionsRequest(), timeout=_WORKER_S)
                    async for part in call:
                        num_forgotten += await self._forget(worker, part.session_ids)
        except (OutriderError, TimeoutError) as problem:
            error = problem
        except asyncio.CancelledError as problem:
            # Raised too where the link has ended, and closed its channel under the call.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = problem
        if error is not None:
            about = {"worker": link.address, "reason": getattr(error, "reason", type(error).__name__)}
            _LOG.info("a worker's sessions were not looked at", extra=about)
        if num_forgotten:
            self._metrics.forgotten.inc(num_forgotten)
            _LOG.info("sessions forgotten", extra={"worker": link.address, "num_sessions": num_forgotten})
        return num_forgotten

    async def _forget(self, worker: "WorkerServiceAsyncStub", session_ids: Sequence[str]) -> int:
        gone = await self._store.gone(session_ids)
        if not gone:
            return 0
        answer = await worker.ForgetSessions(worker_pb2.ForgetSessionsRequest(session_ids=gone), timeout=_CALL_S)
        return answer.num_forgotten
