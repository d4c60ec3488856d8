"""The connection to Redis: Lua scripts in batches, single commands, durability, and the calls in flight.

Scripts that are called in one iteration of the event loop go to Redis as one message. Verdicts of many sessions arrive
together, so their commits are due together: one pipeline for all takes a third of the time of a call for each.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import Any, Final, TypeVar

import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from orchestrator.store.errors import NotDurable, translation
from outrider.errors import Unavailable

_LOG: Final = logging.getLogger(__name__)
_SCRIPTS: Final = ("begin", "append", "renew", "restore", "cancel", "delete", "enter", "spend")
_DURABLE: Final = frozenset(("begin", "append", "restore", "cancel", "delete"))
"""The scripts whose writes must be durable."""
_RETRIES: Final = 2
_MAX_CONNECTIONS: Final = 64
_MAX_BATCH: Final = 64
_CHECK_KEY: Final = "outrider:check"
_CHECK_MS: Final = 60_000

T = TypeVar("T")
ScriptCall = tuple[str, Sequence[str], Sequence[Any]]
"""A script's name, its KEYS and its ARGV."""


class DurabilityLevel(Enum):
    """Where a write must have arrived before it counts."""

    NONE = "none"
    REPLICAS = "replicas"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Durability:
    """The condition that writes must meet before they count.

    Attributes:
        level: the server has accepted them; WAIT; or WAITAOF, which needs Redis 7.2 or Valkey.
        num_replicas: replicas that must have them too; with `DISK`, on their disks.
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

    def check(self, answer: Any) -> None:
        """Raise `NotDurable` unless the command's answer confirms the writes."""
        if isinstance(answer, Exception):
            raise NotDurable(str(answer)) from answer
        if self.level is DurabilityLevel.DISK:
            is_met = answer[0] >= 1 and answer[1] >= self.num_replicas
        else:
            is_met = answer >= self.num_replicas
        if not is_met:
            raise NotDurable(f"{self.command[0]} answered {answer} within {self.timeout_s:g} s")


class RedisConnection:
    """A pool of connections to one Redis, on which every call is bounded in time.

    The call of a caller that is cancelled ends by itself: redis-py leaves a connection open that is cancelled while it
    is being made. And when a connection is closed during a call, redis-py retries the call on a new connection, which
    is then never closed.

    Args:
        url: redis:// or rediss://.
        timeout_s: bound on connecting and on each answer, in seconds; a call makes at most three attempts.
        durability: the condition for writes; the wait for it comes on top of the bound.

    Attributes:
        client: the client, whose methods `call` takes.
    """

    def __init__(self, url: str, timeout_s: float = 1.0, durability: Durability | None = None) -> None:
        self._durability = durability or Durability()
        wait_s = self._durability.timeout_s if self._durability.command else 0.0
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s + wait_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(
                ExponentialBackoff(cap=0.2, base=0.02),
                _RETRIES,
                supported_errors=(exceptions.ConnectionError, exceptions.TimeoutError),
            ),
        )
        self.client = redis.asyncio.Redis.from_pool(pool)
        # Connecting and answering, for each attempt.
        self._bound_s = (_RETRIES + 1) * (2 * timeout_s + wait_s) + timeout_s
        folder = resources.files("orchestrator.store") / "lua"
        checks = (folder / "checks.lua").read_text()
        texts = {name: checks + (folder / f"{name}.lua").read_text() for name in _SCRIPTS}
        self._scripts = {name: self.client.register_script(text) for name, text in texts.items()}
        self._pending: list[tuple[ScriptCall, asyncio.Future[Any]]] = []
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def close(self) -> None:
        """Close all connections, once every call in flight has ended; later calls raise `Unavailable`."""
        self._is_closed = True
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        await self.client.aclose()

    async def check(self) -> None:
        """Write a key that expires by itself; raise `Overloaded` or `Unavailable` where Redis takes no writes."""
        await self.call(self.client.set, _CHECK_KEY, "1", px=_CHECK_MS)

    async def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of a method of the client; raise as `run` does."""
        try:
            return await asyncio.shield(self._start(method(*arguments, **options)))
        except Exception as error:
            if (known := translation(error)) is None:
                raise
            raise known from error

    async def run(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Return the result of a script; see lua/.

        The script of a caller that is cancelled may have run, as with a reply that is lost.

        Raises:
            Overloaded: Redis is out of memory.
            Unavailable: Redis does not answer within the bound, refuses this service, takes no writes, or the
                connection is closed.
            DataLoss: a key has another type than the store writes there.
        """
        self._check_open()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._pending:
            # Without a request's context: a log record of the batch must not carry the ids of its first caller.
            self._start(self._run_pending(), contextvars.Context())
        self._pending.append(((name, keys, arguments), future))
        return await future

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the session store is closed")

    def _start(self, call: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> asyncio.Task[T]:
        """Begin a call; a caller that awaits it shields it from its own cancellation."""
        try:
            self._check_open()
        except Unavailable:
            call.close()
            raise
        task = asyncio.create_task(call, context=context)
        self._in_flight.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            # Retrieved, so that asyncio does not log the error of a call whose caller has left.
            task.exception()

    async def _run_pending(self) -> None:
        pending, self._pending = self._pending, []
        batches = [pending[first : first + _MAX_BATCH] for first in range(0, len(pending), _MAX_BATCH)]
        if len(batches) == 1:
            # Without tasks of its own: this is done for every token of a session that is alone.
            await self._run_batch(batches[0])
        else:
            await asyncio.gather(*map(self._run_batch, batches))

    async def _run_batch(self, batch: list[tuple[ScriptCall, asyncio.Future[Any]]]) -> None:
        """Run calls and settle their futures within the bound, so that no caller waits for ever."""
        try:
            async with asyncio.timeout(self._bound_s):
                results = await self._run([call for call, _ in batch])
        except TimeoutError:
            _LOG.warning("calls of the session store timed out", extra={"num_calls": len(batch)})
            results = [exceptions.TimeoutError(f"no answer within {self._bound_s:g} s")] * len(batch)
        except Exception as error:  # each caller handles it
            results = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(translation(result) or result)
            else:
                future.set_result(result)

    async def _run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Return the results of calls, by the scripts' hashes; load the scripts that the server does not have."""
        results = await self._execute(calls)
        unknown = [index for index, result in enumerate(results) if isinstance(result, exceptions.NoScriptError)]
        if unknown:
            for name in dict.fromkeys(calls[index][0] for index in unknown):
                await self.client.script_load(self._scripts[name].script)
            again = await self._execute([calls[index] for index in unknown])
            for index, result in zip(unknown, again, strict=True):
                results[index] = result
        return results

    async def _execute(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Return the result or the server's error of each call; raise where the server is out of reach."""
        wait = self._durability.command if any(name in _DURABLE for name, _, _ in calls) else ()
        async with self.client.pipeline(transaction=False) as pipeline:
            for name, keys, arguments in calls:
                pipeline.evalsha(self._scripts[name].sha, len(keys), *keys, *arguments)
            if wait:
                pipeline.execute_command(*wait)
            results: list[Any] = await pipeline.execute(raise_on_error=False)
        if wait:
            self._durability.check(results.pop())
        return results
