"""What clients saw, what the log holds, and what plain decoding gives: written down, then compared.

The store's commands are watched from outside (MONITOR), so that what was committed, and by which lease, is known from
the server itself and not from whoever commits.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import redis.asyncio
from redis import exceptions

from outrider.client import Accepted, Delta, Finished, GenerationRequest, OutriderClient, Statistics
from outrider.errors import OutriderError

_KEY = r"(outrider:\{[0-9a-f]+\})"
_CALL = re.compile(rf"^EVALSHA \S+ 3 {_KEY}:session \S+ \S+ (\d+) (\d+)")
_GRANT = re.compile(rf"^HSET {_KEY}:session .*\bfencing_token (\d+)")
_APPEND = re.compile(rf"^APPEND {_KEY}:log")


class HistoryError(AssertionError):
    """A run broke a promise; the message says which, and where."""


@dataclass(slots=True)
class Record:
    """One request as its client saw it.

    Attributes:
        request: what was asked.
        deltas: offset and tokens of each, in order.
        num_terminal: terminal events.
        error: what ended the stream without one.
        session_id: where it ran.
        log: the output that the store holds at the end; None where it could not be asked.
        times_s: when each delta came.
        statistics: what the end said of it.
    """

    request: GenerationRequest
    deltas: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    num_terminal: int = 0
    error: OutriderError | None = None
    session_id: str = ""
    log: list[int] | None = None
    times_s: list[float] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def token_ids(self) -> list[int]:
        """All tokens that came, in the order in which they came."""
        return [token_id for _, token_ids in self.deltas for token_id in token_ids]

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two deltas."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


async def watch(
    client: OutriderClient,
    request: GenerationRequest,
    *,
    after: int = 0,
    strike: Callable[[], object] | None = None,
    timeout_s: float = 40.0,
) -> Record:
    """Runs a request to its end; once `after` tokens have come, `strike` is called, and awaited if it can be."""
    record = Record(request)
    try:
        async with aclosing(client.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                match event:
                    case Accepted():
                        record.session_id = event.session_id
                    case Delta():
                        record.deltas.append((event.offset, tuple(event.token_ids)))
                        record.times_s.append(time.monotonic())
                    case Finished():
                        record.num_terminal += 1
                        record.statistics = event.statistics
                if strike is not None and record.session_id and len(record.token_ids) >= after:
                    pending, strike = strike(), None
                    if asyncio.iscoroutine(pending):
                        await pending
    except OutriderError as error:
        record.error = error
    assert strike is None, "the stream ended before the strike"
    return record


async def read_log(client: OutriderClient, record: Record) -> None:
    """Notes what the store holds of the request's output."""
    session = await client.get_session(record.session_id, with_token_ids=True)
    record.log = list(session.token_ids)[session.prompt_len :]


def check(records: Sequence[Record], plain: Callable[[GenerationRequest], Sequence[int]]) -> None:
    """Compares what clients saw with the log, and both with plain decoding.

    Args:
        records: of all requests of a run.
        plain: returns what plain decoding gives for a request.

    Raises:
        HistoryError: they differ.
    """
    for number, record in enumerate(records):
        _check_stream(number, record)
        expected, seen = list(plain(record.request)), record.token_ids
        whole = record.num_terminal == 1
        _must(seen == (expected if whole else expected[: len(seen)]), number, "the stream is not plain decoding's text")
        if record.log is not None:
            kept = record.log
            _must(kept[: len(seen)] == seen, number, "the log does not have what the client was given")
            _must(not whole or len(kept) == len(seen), number, "the log has more than the client was given at the end")
            _must(kept == expected[: len(kept)], number, "the log is not plain decoding's text")


def _check_stream(number: int, record: Record) -> None:
    length = 0
    for offset, token_ids in record.deltas:
        _must(offset == length, number, f"a delta at offset {offset} follows {length} tokens")
        length += len(token_ids)
    _must(record.num_terminal <= 1, number, f"{record.num_terminal} terminal events")
    ended = record.num_terminal == 1 or record.error is not None
    _must(ended, number, "the stream ended without an event or an error")


class Commits:
    """Which lease wrote what, in the store's own order.

    Attributes:
        num_appends: commits that took effect.
        problems: where an older lease wrote after a newer one was granted, or a lease was granted twice.
    """

    def __init__(self) -> None:
        self.num_appends = 0
        self.problems: list[str] = []
        self._newest: dict[str, int] = {}
        self._called: tuple[str, int] | None = None

    def take(self, command: str) -> None:
        """Learns of one command; what a script does follows its call."""
        if command.startswith("EVALSHA"):
            called = _CALL.match(command)
            self._called = (called[1], int(called[2])) if called else None
        elif (done := _APPEND.match(command)) and self._called and self._called[0] == done[1]:
            self.num_appends += 1
            self._written(*self._called)
        elif granted := _GRANT.match(command):
            self._granted(granted[1], int(granted[2]))

    def check(self) -> None:
        """Raises `HistoryError` where there are problems."""
        if self.problems:
            raise HistoryError("; ".join(self.problems))

    def forget(self) -> None:
        """Learns that some commands may have been missed."""
        self._newest.clear()
        self._called = None

    def _written(self, session: str, fencing_token: int) -> None:
        newest = self._newest.setdefault(session, fencing_token)
        if fencing_token != newest:
            self.problems.append(f"{session}: lease {fencing_token} wrote while {newest} was in force")

    def _granted(self, session: str, fencing_token: int) -> None:
        newest = self._newest.get(session, 0)
        # An owner that writes a lost session again grants nothing.
        is_restored = self._called == (session, fencing_token) and fencing_token == newest
        if fencing_token <= newest and not is_restored:
            self.problems.append(f"{session}: lease {fencing_token} was granted after {newest}")
        self._newest[session] = max(newest, fencing_token)


@asynccontextmanager
async def monitored(url: str) -> AsyncIterator[Commits]:
    """Watches a store's commands for as long as the context is open; then all that was told has been heard."""
    commits, mark, heard = Commits(), secrets.token_hex(8), asyncio.Event()

    async def listen() -> None:
        while True:
            with contextlib.suppress(exceptions.RedisError, OSError):
                async with client.monitor() as monitor:
                    watching.set()
                    async for command in monitor.listen():
                        commits.take(command["command"])
                        if mark in command["command"]:
                            heard.set()
            # The server went away; whatever it does before it is watched again is not known.
            commits.forget()
            await asyncio.sleep(0.02)

    client, watching = redis.asyncio.Redis.from_url(url, socket_timeout=None), asyncio.Event()
    task = asyncio.create_task(listen())
    try:
        await asyncio.wait_for(watching.wait(), 10)
        yield commits
        async with asyncio.timeout(10):
            while not heard.is_set():
                await client.echo(mark)
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


def _must(is_true: bool, number: int, problem: str) -> None:
    if not is_true:
        raise HistoryError(f"request {number}: {problem}")
