"""The thread that runs a worker's engine, and the two protocols of what it calls in every turn.

A turn applies commands within a budget, drops sessions that are too old, runs a step, and publishes the outcome. Where
the step left nothing to do the thread sleeps until a command comes or the engine's next time is reached, and its OpenMP
workers end: a draft may need their cores. Only this thread touches the engine and the sessions.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from outrider.errors import OutriderError
from outrider.serving.inbox import Inbox, ReadBudget
from outrider.serving.openmp import end_workers
from outrider.serving.session_failures import EngineFailed, SessionFailures

_LOG: Final = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)


class CommandHandler(Protocol[CommandT_contra]):
    """Applies the commands of streams to sessions. Its methods are called in the loop's thread."""

    @property
    def num_sessions(self) -> int:
        """Sessions that are open; a drain is complete once there are none."""

    def apply(self, command: CommandT_contra) -> None:
        """Apply a command.

        Raises:
            OutriderError: the command is refused: `refuse` is called next.
            EngineFailed: the engine serves no session any more.
        """

    def refuse(self, command: CommandT_contra, error: OutriderError) -> None:
        """Refuse a command whose `apply` raised a named error."""

    def fail(self, command: CommandT_contra, error: Exception) -> None:
        """End the session whose command raised an unexpected exception, and no other."""


class SteppedEngine(Protocol):
    """Runs steps for all sessions. Its methods are called in the loop's thread."""

    @property
    def step_s(self) -> float:
        """Seconds of a step; bounds how long commands are read between two steps."""

    def expire(self) -> None:
        """Drop the sessions that have been idle for too long."""

    def step(self) -> bool:
        """Run a step if any session needs one; return whether the next turn should begin at once."""

    def publish(self) -> None:
        """Make the load, and the results that were held back, visible to other threads."""

    def wait_s(self) -> float | None:
        """Return the seconds until a step may be needed though no command comes; None for never."""

    def probe(self) -> None:
        """Run a step over a session of the engine's own; raise `EngineFailed` if that fails."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A function to be called in the loop's thread."""

    fn: Callable[[], object]


class EngineLoop(Generic[CommandT]):
    """Runs an engine in a thread of its own.

    Each writer of commands has a bounded queue, and one command of each is applied in turn (see `Inbox`). An exception
    in a command or a step that concerns one session ends that session (see `SessionFailures`); any other exception,
    `EngineFailed` above all, ends the thread after `on_failure` was called.

    Args:
        handler: applies the commands.
        engine: runs the steps; may be the same object.
        name: of the thread.
        on_failure: called in the thread when it ends with an exception.

    Attributes:
        failures: records the failures of sessions; settled once a turn, before results are published.
    """

    def __init__(
        self,
        handler: CommandHandler[CommandT],
        engine: SteppedEngine,
        *,
        name: str,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._handler = handler
        self._engine = engine
        self._on_failure = on_failure
        self._inbox: Inbox[CommandT | _Call] = Inbox()
        self._is_draining = False
        self._drained: Future[None] = Future()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failures = SessionFailures(engine.probe)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; commands that wait are still applied."""
        self._inbox.close()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. From any thread."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds that the current turn has taken; 0 while the thread sleeps. From any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_draining(self) -> bool:
        """Whether new sessions are to be refused. From any thread."""
        return self._is_draining

    @property
    def num_waiting(self) -> int:
        """Commands that wait to be applied. From any thread."""
        return len(self._inbox)

    async def submit(self, writer: object, command: CommandT, num_bytes: int = 0) -> None:
        """Queue a command; wait while too many commands, or bytes, of its writer are queued.

        Args:
            writer: the stream that the command came on; hashable.
            command: the command.
            num_bytes: size of the frame that it came in.
        """
        await self._inbox.put(writer, command, num_bytes)

    def submit_now(self, writer: object, command: CommandT) -> None:
        """Queue a command behind its writer's others without waiting for room, from any thread."""
        self._inbox.put_now(writer, command)

    def run_in_engine(self, fn: Callable[[], object]) -> None:
        """Have the loop's thread call a function before its next step, from any thread.

        An exception of the function is logged, and the engine is probed.
        """
        self._inbox.put_now(None, _Call(fn))

    def drain(self) -> Future[None]:
        """Have new sessions refused from now on, from any thread.

        Returns:
            A future that is done once no session is open, or the thread has ended.
        """
        self._is_draining = True
        self.run_in_engine(lambda: None)  # wakes the thread
        return self._drained

    def apply_commands(self, is_wanted: Callable[[CommandT], bool] | None = None) -> None:
        """Apply the commands that wait, within the budget of a turn. In the loop's thread only.

        Args:
            is_wanted: whether a command may be applied now; one that may not holds back those behind it on its stream.
        """
        budget = ReadBudget.beside(self._engine.step_s, self._handler.num_sessions)
        if is_wanted is None:
            self._inbox.read(self._apply, budget)
        else:
            self._inbox.read(self._apply, budget, lambda item: not isinstance(item, _Call) and is_wanted(item))

    def _run(self) -> None:
        try:
            while not self._inbox.closed:
                self._turn()
            # The streams that were cut at the end still have sessions to close.
            self._inbox.read(self._apply)
        except Exception:
            _LOG.exception("the engine failed")
            self._on_failure()
        finally:
            self._end_drain()

    def _turn(self) -> None:
        self._busy_since = time.monotonic()
        self.apply_commands()
        self._engine.expire()
        goes_on = self._engine.step()
        # Before results leave: no session is refused for an engine that fails.
        self.failures.settle()
        self._engine.publish()
        if self._is_draining and not self._handler.num_sessions:
            self._end_drain()
        if not goes_on:
            wait_s = self._engine.wait_s()
            self._busy_since = None
            if not len(self._inbox):
                end_workers()
            self._inbox.wait(wait_s)

    def _apply(self, item: CommandT | _Call) -> None:
        if isinstance(item, _Call):
            self._call(item.fn)
            return
        try:
            self._handler.apply(item)
        except EngineFailed:
            raise
        except OutriderError as error:
            self._handler.refuse(item, error)
        except Exception as error:
            self._handler.fail(item, error)

    def _call(self, fn: Callable[[], object]) -> None:
        try:
            fn()
        except EngineFailed:
            raise
        except Exception as error:
            self.failures.record("a call in the engine's thread failed", error)

    def _end_drain(self) -> None:
        if not self._drained.done():
            self._drained.set_result(None)
