"""Lua scripts of the session store; those that are called in the same moment go to Redis as one message.

The target's verdicts on many sessions arrive together, so their commits are due together: one pipeline for all costs a
third of the time that a call for each would.
"""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import Any, Final, TypeVar

import redis.asyncio
from redis import exceptions

_LOG: Final = logging.getLogger(__name__)
_MAX_BATCH: Final = 64

T = TypeVar("T")

Call = tuple[str, Sequence[str], Sequence[Any]]
"""A script's name, its KEYS and its ARGV."""


class DurabilityLevel(Enum):
    """Where a write must have arrived before it counts."""

    NONE = "none"
    REPLICAS = "replicas"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Durability:
    """What must have happened to writes before they count.

    Attributes:
        level: nothing more than that the server has taken them; WAIT; WAITAOF, which needs Redis 7.2 or Valkey.
        num_replicas: that must have them too; with `DISK`, on their disks.
        timeout_s: bound on that, in seconds.
    """

    level: DurabilityLevel = DurabilityLevel.NONE
    num_replicas: int = 0
    timeout_s: float = 2.0

    @property
    def command(self) -> tuple[str | int, ...]:
        """The command that waits for it; empty for none."""
        milliseconds = int(1000 * self.timeout_s)
        match self.level:
            case DurabilityLevel.REPLICAS:
                return ("WAIT", self.num_replicas, milliseconds)
            case DurabilityLevel.DISK:
                return ("WAITAOF", 1, self.num_replicas, milliseconds)
            case _:
                return ()

    def is_met(self, answer: Any) -> bool:
        """Returns whether the command's answer says that it has happened."""
        if self.level is DurabilityLevel.DISK:
            return bool(answer[0] >= 1 and answer[1] >= self.num_replicas)
        return bool(answer >= self.num_replicas)


class NotDurable(exceptions.RedisError):
    """A write was taken, but is not where it must be in time; it may count later."""


async def uninterrupted(call: Awaitable[T]) -> T:
    """Returns what a call gives; when cancelled, lets the call come to its end, which must be bounded, before that.

    redis-py leaves a connection open that is cancelled while it is being made.
    """
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()
        raise


class Scripts:
    """Runs scripts by their hashes, and loads them where the server does not know them.

    Args:
        client: the connection; bounds time and attempts.
        names: files in `orchestrator/lua`, without their ending.
        durability: what must have happened to what scripts write.
        durable: the scripts whose writes it is about.
        bound_s: on all attempts of a call together; beyond what the connection's own bounds come to.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        names: Sequence[str],
        durability: Durability | None = None,
        durable: Collection[str] = (),
        bound_s: float = 60.0,
    ) -> None:
        folder = resources.files("orchestrator") / "lua"
        checks = (folder / "checks.lua").read_text()
        self._client = client
        self._bound_s = bound_s
        self._durability = durability or Durability()
        self._durable = frozenset(durable)
        texts = {name: checks + (folder / f"{name}.lua").read_text() for name in names}
        self._scripts = {name: client.register_script(text) for name, text in texts.items()}
        self._pending: list[tuple[Call, asyncio.Future[Any]]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Returns what the script returns; raises redis's own exceptions.

        A caller that is cancelled may have had its script run all the same, as with a reply that is lost.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._pending:
            # In no request's context: what is logged of a batch is not about the first of its callers.
            loop.call_soon(self._start, context=contextvars.Context())
        self._pending.append(((name, keys, arguments), future))
        return await future

    async def settle(self) -> None:
        """Returns when no script runs any more: a connection must not be closed under one, which would open another."""
        while self._pending or self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
            await asyncio.sleep(0)

    def _start(self) -> None:
        pending, self._pending = self._pending, []
        for first in range(0, len(pending), _MAX_BATCH):
            task = asyncio.create_task(self._run_batch(pending[first : first + _MAX_BATCH]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run_batch(self, batch: list[tuple[Call, asyncio.Future[Any]]]) -> None:
        """Runs calls and settles their futures, within the bound: whatever happens, no caller waits for ever."""
        try:
            async with asyncio.timeout(self._bound_s):
                results = await self._run([call for call, _ in batch])
        except TimeoutError:
            _LOG.warning("the session store was given up on", extra={"num_calls": len(batch)})
            results = [exceptions.TimeoutError(f"no answer within {self._bound_s:g} s")] * len(batch)
        except Exception as error:  # each caller's, who knows what to make of it
            results = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        results = await self._try(calls)
        unknown = [index for index, result in enumerate(results) if isinstance(result, exceptions.NoScriptError)]
        if unknown:
            for name in dict.fromkeys(calls[index][0] for index in unknown):
                await self._client.script_load(self._scripts[name].script)
            again = await self._try([calls[index] for index in unknown])
            for index, result in zip(unknown, again, strict=True):
                results[index] = result
        return results

    async def _try(self, calls: Sequence[Call]) -> list[Any]:
        """Returns the result or the server's error of each call; raises where the server is not reached."""
        wait = self._durability.command if any(name in self._durable for name, _, _ in calls) else ()
        async with self._client.pipeline(transaction=False) as pipeline:
            for name, keys, arguments in calls:
                pipeline.evalsha(self._scripts[name].sha, len(keys), *keys, *arguments)
            if wait:
                pipeline.execute_command(*wait)
            results: list[Any] = await pipeline.execute(raise_on_error=False)
        if wait:
            answer = results.pop()
            if isinstance(answer, Exception):
                raise NotDurable(str(answer)) from answer
            if not self._durability.is_met(answer):
                raise NotDurable(f"{wait[0]} answered {answer} within {self._durability.timeout_s:g} s")
        return results
