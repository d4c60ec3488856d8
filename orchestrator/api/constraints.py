"""Checks of constraints before a request is leased, in processes that end where a constraint takes too long."""

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict, deque
from typing import Any, Final

from orchestrator.workers.model import Model
from outrider.constraint import FIELD, Constraint
from outrider.errors import InvalidArgument, Overloaded, Unavailable
from outrider.grammar.checking import MAX_COMPILE_S

_LOG: Final = logging.getLogger(__name__)
_MODULE: Final = "outrider.grammar.checking"
_NUM_PROCESSES: Final = 2
"""So that one constraint that takes its whole time does not hold up all others."""
_MAX_QUEUED: Final = 64
_MAX_WAIT_S: Final = 10.0
_START_S: Final = 30.0
"""Python, and a tokenizer of a large vocabulary, on a busy machine."""
_ANSWER_S: Final = 30.0
_MAX_KNOWN: Final = 1024
_MAX_KNOWN_BYTES: Final = 8 << 20


class ConstraintChecks:
    """Checks constraints as the targets will compile them; what was found is kept.

    Attributes:
        started: the latest processes, for tests.
    """

    def __init__(self) -> None:
        self.started: deque[_Checker] = deque(maxlen=2 * _NUM_PROCESSES)
        self._free = asyncio.Semaphore(_NUM_PROCESSES)
        self._idle: list[_Checker] = []
        self._num_queued = 0
        self._known: OrderedDict[tuple[str, Constraint], str | None] = OrderedDict()
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
            self._remember(key, await self._checked(constraint, model))
        self._known.move_to_end(key)
        if (problem := self._known[key]) is not None:
            raise InvalidArgument(problem.removeprefix(f"{FIELD}: "), FIELD)

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for checker in self._idle:
            checker.kill()
        self._idle.clear()

    def _remember(self, key: tuple[str, Constraint], problem: str | None) -> None:
        self._known[key] = problem
        while len(self._known) > 1 and (
            len(self._known) > _MAX_KNOWN or sum(item.num_bytes for _, item in self._known) > _MAX_KNOWN_BYTES
        ):
            self._known.popitem(last=False)

    async def _checked(self, constraint: Constraint, model: Model) -> str | None:
        await self._enter()
        checker: _Checker | None = None
        try:
            checker = await self._checker(model)
            problem = await checker.check(constraint)
        except BaseException:
            # It may be in the middle of an answer.
            if checker is not None:
                checker.kill()
            raise
        finally:
            self._free.release()
        if checker.has_ended or self._is_closed:
            checker.kill()
        else:
            self._idle.append(checker)
        return problem

    async def _enter(self) -> None:
        if self._free.locked() and self._num_queued >= _MAX_QUEUED:
            raise Overloaded(f"{self._num_queued} constraints wait to be checked, the limit")
        self._num_queued += 1
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise Overloaded(f"no process to check the constraint became free within {_MAX_WAIT_S:g} s") from None
        finally:
            self._num_queued -= 1

    async def _checker(self, model: Model) -> "_Checker":
        """Return a process for a model's tokenizer; end those for others."""
        while self._idle:
            checker = self._idle.pop()
            if checker.fingerprint == model.tokenizer_fingerprint and not checker.has_ended:
                return checker
            checker.kill()
        checker = await _Checker.start(model)
        self.started.append(checker)
        return checker


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
        first = {
            "tokenizer": model.tokenizer.backend.to_str(),
            "vocabulary_size": model.vocabulary_size,
            "eos_token_ids": list(model.eos_token_ids),
        }
        answer = await checker._ask(first, _START_S)
        if answer != "null":
            checker.kill()
            raise Unavailable("constraints cannot be checked: llguidance does not start with this tokenizer")
        return checker

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None or self._process.stdout is None or self._process.stdout.at_eof()

    async def check(self, constraint: Constraint) -> str | None:
        """Return what is wrong with a constraint; None for nothing."""
        answer = await self._ask(constraint.as_dict(), _ANSWER_S)
        if not answer:
            self.kill()
            _LOG.warning("a constraint was not compiled within its bounds", extra={"num_bytes": constraint.num_bytes})
            return f"{constraint.kind} takes more than {MAX_COMPILE_S:g} s or too much memory to compile"
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

    async def _ask(self, content: dict[str, Any], timeout_s: float) -> str:
        """Send a line; return the answer, empty where the process ends or takes too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(json.dumps(content).encode() + b"\n")
                await self._process.stdin.drain()
                return (await self._process.stdout.readline()).decode().strip()
        return ""
