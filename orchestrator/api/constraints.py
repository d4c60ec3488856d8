"""Checks of constraints before a request is leased, in processes that end where a constraint takes too long."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from orchestrator.workers.model import Model
from outrider.constraint import FIELD, Constraint
from outrider.errors import InvalidArgument, Overloaded, Unavailable

_LOG: Final = logging.getLogger(__name__)
_MODULE: Final = "outrider.grammar.checking"
_MAX_CPU_S: Final = 2.0
"""Seconds of the CPU that a constraint may take; a large legitimate schema takes 0.2."""
_LONG_S: Final = 1.0
"""Of a check: from then on it has a lower priority, and the next one runs beside it, so that it does not hold up all
others. But for that one runs at a time, since what serves needs the cores."""
_LAST_NICENESS: Final = 15
"""Where others keep all cores busy, a thirtieth of one: what is left of a large schema's half a second is in time."""
_MAX_QUEUED: Final = 64
_MAX_WAIT_S: Final = 10.0
_START_S: Final = 30.0
"""Python, and a tokenizer of a large vocabulary, on a busy machine."""
_ANSWER_S: Final = 30.0
_END_S: Final = 1.0
_MAX_KNOWN: Final = 1024
_MAX_KNOWN_BYTES: Final = 8 << 20


class ConstraintChecks:
    """Checks constraints as the targets will compile them; what was found is kept.

    Attributes:
        started: the latest processes, for tests.
    """

    def __init__(self) -> None:
        self.started: deque[_Checker] = deque(maxlen=4)
        self._turn = asyncio.Semaphore(1)
        self._one_takes_long = False
        self._next_long: Callable[[], None] | None = None
        self._idle: list[_Checker] = []
        self._num_queued = 0
        self._known: OrderedDict[tuple[str, Constraint], str | None] = OrderedDict()
        self._known_bytes = 0
        self._running: dict[tuple[str, Constraint], _Check] = {}
        self._unfit: dict[str, str] = {}
        self._is_closed = False

    async def check(self, constraint: Constraint | None, model: Model) -> None:
        """Return where a constraint can be used with a model.

        Raises:
            InvalidArgument: it is wrong, or takes too long to compile; the message is llguidance's.
            Overloaded: too many wait to be checked.
            Unavailable: no process could check it.
        """
        if constraint is None:
            return
        if model.tokenizer is None or not model.takes_constraints:
            raise InvalidArgument("the targets take no constraints", FIELD)
        key = (model.tokenizer_fingerprint, constraint)
        if key not in self._known:
            await self._shared(key, model)
        self._known.move_to_end(key)
        if (problem := self._known[key]) is not None:
            raise InvalidArgument(problem.removeprefix(f"{FIELD}: "), FIELD)

    async def _shared(self, key: tuple[str, Constraint], model: Model) -> None:
        """Check a constraint once for all callers that wait for it; the last that leaves ends the check."""
        check = self._running.get(key)
        if check is None:
            check = self._running[key] = _Check(asyncio.create_task(self._find(key, model)))
            check.task.add_done_callback(functools.partial(self._end, key, check))
        check.num_waiting += 1
        try:
            await asyncio.shield(check.task)
        except asyncio.CancelledError:
            check.num_waiting -= 1
            if not check.num_waiting:
                check.task.cancel()
                self._end(key, check)
            raise

    def _end(self, key: tuple[str, Constraint], check: "_Check", task: "asyncio.Task[None] | None" = None) -> None:
        if self._running.get(key) is check:
            del self._running[key]
        # Retrieved, since all callers may have left.
        if task is not None and not task.cancelled():
            task.exception()

    async def _find(self, key: tuple[str, Constraint], model: Model) -> None:
        self._remember(key, await self._checked(key[1], model))

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for checker in self._idle:
            checker.kill()
        self._idle.clear()

    def _remember(self, key: tuple[str, Constraint], problem: str | None) -> None:
        self._known[key] = problem
        self._known_bytes += key[1].num_bytes
        while len(self._known) > 1 and (len(self._known) > _MAX_KNOWN or self._known_bytes > _MAX_KNOWN_BYTES):
            (_, oldest), _ = self._known.popitem(last=False)
            self._known_bytes -= oldest.num_bytes

    async def _checked(self, constraint: Constraint, model: Model) -> str | None:
        checker: _Checker | None = None
        has_ended = False

        def take_long() -> None:
            nonlocal has_ended
            if self._one_takes_long:
                self._next_long = take_long
                return
            self._one_takes_long = has_ended = True
            self._turn.release()
            if checker is not None:
                checker.run_last()

        await self._enter()
        timer = asyncio.get_running_loop().call_later(_LONG_S, take_long)
        try:
            checker = await self._checker(model)
            problem = await checker.check(constraint)
        except BaseException:
            # It may be in the middle of an answer.
            if checker is not None:
                checker.kill()
            raise
        finally:
            timer.cancel()
            if has_ended:
                self._one_takes_long = False
                if (next_long := self._next_long) is not None:
                    self._next_long = None
                    next_long()
            else:
                self._next_long = None
                self._turn.release()
        if checker.is_usable and not self._is_closed:
            self._idle.append(checker)
        else:
            checker.kill()
        return problem

    async def _enter(self) -> None:
        if self._turn.locked() and self._num_queued >= _MAX_QUEUED:
            raise Overloaded(f"{self._num_queued} constraints wait to be checked, the limit")
        self._num_queued += 1
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded(f"no process to check the constraint became free within {_MAX_WAIT_S:g} s") from None
        finally:
            self._num_queued -= 1

    async def _checker(self, model: Model) -> "_Checker":
        """Return a process for a model's tokenizer; end those for others."""
        while self._idle:
            checker = self._idle.pop()
            if checker.fingerprint == model.tokenizer_fingerprint and checker.is_usable:
                return checker
            checker.kill()
        if (problem := self._unfit.get(model.tokenizer_fingerprint)) is not None:
            raise InvalidArgument(problem, FIELD)
        try:
            checker = await _Checker.start(model)
        except InvalidArgument as error:
            self._unfit[model.tokenizer_fingerprint] = error.message
            raise
        self.started.append(checker)
        return checker


@dataclass(slots=True, eq=False)
class _Check:
    """A check that runs.

    Attributes:
        task: runs it.
        num_waiting: callers that wait for it.
    """

    task: "asyncio.Task[None]"
    num_waiting: int = 0


class _Checker:
    """One process.

    Args:
        process: with pipes.
        fingerprint: of the tokenizer that it checks with.
    """

    def __init__(self, process: asyncio.subprocess.Process, fingerprint: str) -> None:
        self._process = process
        self.fingerprint = fingerprint
        self.is_killed = False
        self._runs_last = False

    @classmethod
    async def start(cls, model: Model) -> "_Checker":
        """Return a process that has loaded a model's tokenizer; raise `Unavailable` where it does not start."""
        assert model.tokenizer is not None
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        checker = cls(process, model.tokenizer_fingerprint)
        try:
            # In a thread: a large vocabulary takes a part of a second.
            first = await asyncio.to_thread(_first_line, model)
            answer = await checker._ask(first, _START_S)
            if not answer:
                raise Unavailable("constraints cannot be checked: the process that does so does not start")
            if (problem := json.loads(answer)) is not None:
                raise InvalidArgument(problem.removeprefix(f"{FIELD}: "), FIELD)
        except BaseException:
            checker.kill()
            raise
        return checker

    @property
    def is_usable(self) -> bool:
        """Whether it takes another constraint: it runs, with the priority that it began with."""
        has_ended = (
            self._process.returncode is not None or self._process.stdout is None or self._process.stdout.at_eof()
        )
        return not has_ended and not self._runs_last and not self.is_killed

    def run_last(self) -> None:
        """Give the process a lower priority, for good."""
        self._runs_last = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LAST_NICENESS)

    async def check(self, constraint: Constraint) -> str | None:
        """Return what is wrong with a constraint, None for nothing; raise `Overloaded` where it was given no time."""
        answer = await self._ask(json.dumps(constraint.as_dict()).encode(), _ANSWER_S)
        if not answer:
            # First, since it may end by itself, and says then why.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), _END_S)
            self.kill()
            # Its own bound on the CPU ends it by SIGPROF, its own bound on memory by an exit of another kind.
            if self._process.returncode in (None, -signal.SIGALRM, -signal.SIGKILL):
                raise Overloaded("the machine had no time to check the constraint")
            _LOG.warning("a constraint was not compiled within its bounds", extra={"num_bytes": constraint.num_bytes})
            return f"{constraint.kind} takes more than {_MAX_CPU_S:g} s or too much memory to compile"
        problem: str | None = json.loads(answer)
        return problem

    def kill(self) -> None:
        """End the process."""
        self.is_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> None:
        """Return once the process has ended."""
        await self._process.wait()

    async def _ask(self, line: bytes, timeout_s: float) -> str:
        """Send a line; return the answer, empty where the process ends or takes too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(line + b"\n")
                await self._process.stdin.drain()
                return (await self._process.stdout.readline()).decode().strip()
        return ""


def _first_line(model: Model) -> bytes:
    """Return what a process reads first: the tokenizer, and what the targets have of it."""
    assert model.tokenizer is not None
    content = {
        "tokenizer": model.tokenizer.backend.to_str(),
        "vocabulary_size": model.vocabulary_size,
        "eos_token_ids": list(model.eos_token_ids),
        "max_cpu_s": _MAX_CPU_S,
    }
    return json.dumps(content).encode()
