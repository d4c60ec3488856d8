"""Load polling: reads a worker's load at intervals, and finds out that a worker hangs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

import grpc

from outrider.serving.unexpected import UnexpectedErrors
from outrider.v1 import worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

_LOG: Final = logging.getLogger(__name__)
_TIMEOUT_S: Final = 5.0
# A worker that drains, or is full, gets no new sessions from then on.
_MAX_INTERVAL_S: Final = 2.0
_POLLS_PER_KEEPALIVE: Final = 10
_MAX_UNANSWERED: Final = 2
"""Polls in a row without an answer, after which a worker counts as hung: a stopped process keeps its connections, and
keepalive pings detect it later."""


def interval_s(keepalive_s: float) -> float:
    """Return the seconds between two polls: a shorter keepalive asks for failures to be noticed sooner."""
    return min(_MAX_INTERVAL_S, keepalive_s / _POLLS_PER_KEEPALIVE)


async def polled_loads(
    channel: grpc.aio.Channel, address: str, interval_s: float, unexpected: UnexpectedErrors
) -> AsyncIterator[worker_pb2.GetLoadResponse]:
    """Poll the load of a worker and yield each answer; end after two polls in a row without an answer.

    Args:
        channel: to the worker.
        address: of the worker, for the log.
        interval_s: seconds between an answer and the next poll.
        unexpected: logs errors that are not statuses.
    """
    worker = WorkerServiceStub(channel)
    num_unanswered = 0
    while num_unanswered < _MAX_UNANSWERED:
        try:
            load = await worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _LOG.debug("no load", extra={"worker": address, "code": error.code().name})
            # Any other status is an answer: the worker is alive.
            num_unanswered += error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        except Exception as error:
            # It must not end the polling: a call that fails is a poll without an answer.
            unexpected.log("load polling failed", error, worker=address)
            num_unanswered += 1
        else:
            num_unanswered = 0
            yield load
        await asyncio.sleep(interval_s)
