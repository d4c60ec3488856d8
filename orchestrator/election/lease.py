"""An election held by a Lease of the cluster, with the election of the `kubernetes` package.

Import this module only where there is a cluster: it takes a second, and memory.
"""

import asyncio
import logging
from typing import Any, Final

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from orchestrator.discovery.api import API_ERRORS, status_of
from orchestrator.election.election import Work

_LOG: Final = logging.getLogger(__name__)
_LEASE_S: Final = 30.0
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_RENEW_SHARE: Final = 8 / 15
_RETRY_SHARE: Final = 2 / 15
"""Of the lease: for how long its holder tries to renew it, and how often. Before that the library sleeps for one retry
period, a last try may take as long again, and so does the sleep behind it: together 14/15. What is left is for an
answer to the last success that came late. So the work is told to end before another one's begins."""

# It tells of each try that fails, with a traceback. What matters of it is told here.
logging.getLogger("kubernetes.aio.leaderelection").setLevel(logging.CRITICAL)


class LeaseElection:
    """See `orchestrator.election.election.Election`.

    Args:
        api: client of the API server (`kubernetes.aio.client.ApiClient`), which stays the caller's.
        namespace: of the Lease.
        name: of the Lease, which is made where it is missing.
        identity: of this process; no other one may have the same.
        lease_s: seconds that the Lease lasts unless renewed, at least 8.
    """

    def __init__(self, api: Any, namespace: str, name: str, identity: str, lease_s: float = _LEASE_S) -> None:
        self._lease_s = lease_s
        self._retry_s = lease_s * _RETRY_SHARE
        # A try is two calls.
        self._lock = _Lock(name, namespace, identity, api, timeout_s=self._retry_s / 2)

    async def run(self, work: Work) -> None:
        """See `Election`."""
        while True:
            leading = _Leading(work)
            election = LeaderElection(
                Config(
                    self._lock,
                    # An integer in the API, and one that the library writes as it is given.
                    lease_duration=int(self._lease_s),
                    renew_deadline=self._lease_s * _RENEW_SHARE,
                    retry_period=self._retry_s,
                    onstarted_leading=leading.run,
                    onstopped_leading=_nothing,
                )
            )
            standing = asyncio.create_task(election.run())
            over = asyncio.create_task(leading.is_over.wait())
            try:
                # The library does not notice that the work has ended, and cancels it only where the election has.
                await asyncio.wait((standing, over), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (standing, over):
                    task.cancel()
                await asyncio.gather(standing, over, return_exceptions=True)
                await leading.stop()
                await self._lock.release()
            if not standing.cancelled():
                standing.result()
            _LOG.warning("no longer elected", extra={"lease": self._lock.name})
            await asyncio.sleep(self._retry_s)


async def _nothing() -> None:
    """What is left to do when the library has noticed an end: `run` sees to all of it."""


class _Leading:
    """The work of a time in office, however it ends."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self.is_over = asyncio.Event()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        _LOG.info("elected")
        try:
            await self._work()
        finally:
            self.is_over.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class _Lock(LeaseLock):
    """A Lease whose calls end in time, and fail as the library expects: it knows of no other error than a status."""

    def __init__(self, name: str, namespace: str, identity: str, api: Any, timeout_s: float) -> None:
        super().__init__(name, namespace, identity, api)
        self._timeout_s = timeout_s

    async def get(self, name: str, namespace: str) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                is_read, found = await super().get(name, namespace)
        except API_ERRORS as error:
            is_read, found = False, ApiException(status=0, reason=type(error).__name__)
        if isinstance(found, Exception) and status_of(found) != _NOT_FOUND:
            self._failed("read", found)
        return is_read, found

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        # The library's own asks for a pretty answer in a way that its client refuses (kubernetes 37).
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.api_instance.create_namespaced_lease(namespace, lease)
        except API_ERRORS as error:
            return self._failed("made", error)
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        # Not the library's own, which keeps from its caller why it failed.
        lease = self.lease_reference
        if lease is None:
            return False
        lease.spec = self.update_lease(updated_record, lease.spec)
        return await self._replace(lease, "renewed")

    async def release(self) -> None:
        """Gives the Lease up, where it is held; where that fails it expires by itself."""
        is_read, record = await self.get(self.name, self.namespace)
        lease = self.lease_reference
        if not is_read or record.holder_identity != self.identity or lease is None or lease.spec is None:
            return
        lease.spec.holder_identity = None
        await self._replace(lease, "given back")

    async def _replace(self, lease: client.V1Lease, what: str) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)
        except API_ERRORS as error:
            return self._failed(what, error)
        return True

    def _failed(self, what: str, error: Exception) -> bool:
        """Tells of a call that failed; returns False. That another one was quicker is the way of elections."""
        status = status_of(error)
        about = {"lease": self.name, "status": status, "problem": getattr(error, "reason", "") or type(error).__name__}
        _LOG.log(logging.DEBUG if status == _CONFLICT else logging.WARNING, f"lease not {what}", extra=about)
        return False
