"""Lua scripts of the session store; those that are called in the same moment go to Redis as one message.

The target's verdicts on many sessions arrive together, so their commits are due together: one pipeline for all costs a
third of the time that a call for each would.
"""

import asyncio
import contextvars
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import Any, Final

import redis.asyncio
from redis import exceptions

from orchestrator.store.calls import RedisCalls

_LOG: Final = logging.getLogger(__name__)
_MAX_BATCH: Final = 64

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


class Scripts:
    """Runs scripts by their hashes, and loads them where the server does not know them.

    Args:
        client: the connection; bounds time and attempts.
        names: files in `orchestrator/lua`, without their ending.
        durability: what must have happened to what scripts write.
        durable: the scripts whose writes it is about.
        bound_s: on all attempts of a call together; beyond what the connection's own bounds come to.
        calls: those of the client that are in flight; these are added.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        names: Sequence[str],
        durability: Durability | None = None,
        durable: Collection[str] = (),
        bound_s: float = 60.0,
        calls: RedisCalls | None = None,
    ) -> None:
        folder = resources.files("orchestrator.store") / "lua"
        checks = (folder / "checks.lua").read_text()
        self._client = client
        self._bound_s = bound_s
        self._durability = durability or Durability()
        self._durable = frozenset(durable)
        texts = {name: checks + (folder / f"{name}.lua").read_text() for name in names}
        self._scripts = {name: client.register_script(text) for name, text in texts.items()}
        self._pending: list[tuple[Call, asyncio.Future[Any]]] = []
        self._calls = calls or RedisCalls()

    async def run(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Returns what the script returns; raises redis's own exceptions, and `Unavailable` for calls that are closed.

        A caller that is cancelled may have had its script run all the same, as with a reply that is lost.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.check_open()
        if not self._pending:
            # In no request's context: what is logged of a batch is not about the first of its callers.
            self._calls.start(self._run_pending(), contextvars.Context())
        self._pending.append(((name, keys, arguments), future))
        return await future

    async def _run_pending(self) -> None:
        pending, self._pending = self._pending, []
        batches = (pending[first : first + _MAX_BATCH] for first in range(0, len(pending), _MAX_BATCH))
        await asyncio.gather(*(self._run_batch(batch) for batch in batches))

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
