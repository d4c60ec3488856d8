"""What a stack learns from its workers: where they compute, and which of them get no sessions."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from outrider.client.client import OutriderClient
from outrider.errors import OutriderError
from outrider.serving.channel import open_channel
from outrider.serving.status import peer_errors
from outrider.v1 import generation_pb2, worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

_INFO_TIMEOUT_S: Final = 5.0
_SEEN_TIMEOUT_S: Final = 5.0
"""Seconds in which an orchestrator connects to workers of this machine; it takes milliseconds."""
_POLL_S: Final = 0.05
_NOT_CONNECTED: Final = "not connected yet"
_CPU: Final = ("cpu", "table", "")
"""What numerics begin with on a CPU; a table is a Markov model's. Empty: the target did not answer."""


async def fitting_lookahead(targets: Iterable[str], target_threads: int) -> Mapping[str, str]:
    """Return the orchestrators' setting that fits where these targets compute; none where the default fits.

    Drafts run ahead of verdicts where they have processors of their own. Beside a target that uses all cores of this
    machine they would slow it down, and wait for each verdict.

    Args:
        targets: addresses of targets that serve.
        target_threads: CPU threads of each; 0 for all cores.
    """
    numerics = await asyncio.gather(*(_numerics(address) for address in targets))
    devices = {text.partition(" ")[0] for text in numerics}
    return {"OUTRIDER_LOOKAHEAD": "0"} if not target_threads and devices.intersection(_CPU) else {}


async def out_of_rotation(client: OutriderClient, num_workers: int) -> Sequence[generation_pb2.WorkerStatus]:
    """Return the workers that get no sessions, once the orchestrator knows all of them, or after a few seconds.

    Raises:
        OutriderError: the orchestrator refuses to list them.
    """
    statuses: Sequence[generation_pb2.WorkerStatus] = ()
    try:
        async with asyncio.timeout(_SEEN_TIMEOUT_S):
            while not _are_known(statuses, num_workers):
                await asyncio.sleep(_POLL_S if statuses else 0)
                statuses = (await client.list_models()).workers
    except TimeoutError:
        pass
    return [status for status in statuses if not status.in_rotation]


async def _numerics(address: str) -> str:
    """Return the numerics of a worker; empty where it does not answer, as one that speaks TLS."""
    async with open_channel(address) as channel:
        try:
            with peer_errors():
                stub = WorkerServiceStub(channel)
                return (await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S)).numerics
        except OutriderError:
            return ""


def _are_known(statuses: Sequence[generation_pb2.WorkerStatus], num_workers: int) -> bool:
    seen = [status for status in statuses if status.HasField("info") and status.reason != _NOT_CONNECTED]
    return len(seen) >= num_workers
