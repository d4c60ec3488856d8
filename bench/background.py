"""Sessions that generate in the background while something else is measured."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from bench.traffic import RequestTemplate, Trace, follow
from outrider.client import OutriderClient
from outrider.errors import OutriderError

_POLL_S: Final = 0.005


@asynccontextmanager
async def background_sessions(
    client: OutriderClient, prompts: Sequence[Sequence[int]], template: RequestTemplate, *, num_deltas: int = 1
) -> AsyncIterator[list[Trace]]:
    """Run one session per prompt, which are cancelled at the end of the context; yield their traces.

    The context begins once every session has `num_deltas` deltas or has ended.

    Raises:
        TimeoutError: a session has too few deltas within the timeout of `template`.
        OutriderError: a generation failed before.
    """
    requests = [template.request(prompt, session_id=uuid.uuid4().hex) for prompt in prompts]
    traces = [Trace() for _ in requests]
    pairs = list(zip(requests, traces, strict=True))
    tasks = [asyncio.create_task(follow(client, request, trace, template.timeout_s)) for request, trace in pairs]
    try:
        async with asyncio.timeout(template.timeout_s):
            for task, trace in zip(tasks, traces, strict=True):
                await _reach(task, trace, num_deltas)
        yield traces
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(_cancel(client, request.session_id, request.request_id) for request in requests))


async def _reach(task: asyncio.Task[Trace], trace: Trace, num_deltas: int) -> None:
    while len(trace.times_s) < num_deltas and not task.done():
        await asyncio.sleep(_POLL_S)
    if task.done():
        task.result()


async def _cancel(client: OutriderClient, session_id: str, request_id: str) -> None:
    # Some sessions have already ended.
    with suppress(OutriderError):
        await client.cancel(session_id, request_id)
