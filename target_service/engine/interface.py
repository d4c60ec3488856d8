"""The cut between a target's frontend and the engine behind it.

The frontend has what every engine needs alike: streams and their handles, fencing, admission, drains and refusals. An
engine gets commands for its own requests and posts results (`target_service.engine.results`) to the streams of their
handles, which it only passes on. Another engine, for instance one that embeds a serving library, implements
`TargetEngine`; `outrider.serving.engine_loop` runs it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from outrider.errors import OutriderError
from outrider.serving.engine_loop import SteppedEngine
from target_service.engine.commands import Handle, Open, RequestCommand
from target_service.engine.counters import EngineLoad


class EngineRequest(Protocol):
    """An engine's own record of a request that is open."""

    @property
    def handle(self) -> Handle:
        """Where results of the request go, as its `Open` named it."""

    @property
    def log_fields(self) -> Mapping[str, str]:
        """Fields of log records about the request."""


RequestT = TypeVar("RequestT", bound=EngineRequest)
RequestT_contra = TypeVar("RequestT_contra", bound=EngineRequest, contravariant=True)


class EngineHost(Protocol[RequestT_contra]):
    """Services of the frontend to the engine behind it."""

    def run_in_engine(self, fn: Callable[[], object]) -> None:
        """Have the engine's thread call a function before its next step, from any thread."""

    def apply_gentle(self) -> None:
        """Apply the commands that came during a step and change nothing that it was made of.

        Call it after the step has run and before its results are decided, in the engine's thread.
        """

    def fail_request(self, request: RequestT_contra, error: Exception) -> None:
        """End a request that failed by itself, in the engine's thread.

        The engine is probed once; then the request is refused and closed.

        Raises:
            EngineFailed: the probe failed, so the request is not at fault.
        """


class TargetEngine(SteppedEngine, Protocol[RequestT]):
    """An engine behind a target's frontend. All methods but `start` and `flush` are called in the loop's thread.

    Attributes:
        load: counters, written in the loop's thread and read by any.
    """

    load: EngineLoad

    def attach(self, host: EngineHost[RequestT]) -> None:
        """Take the host; called once, before `start`."""

    def start(self) -> None:
        """Prepare for the first step, before the loop's thread runs."""

    def check(self, command: Open) -> None:
        """Raise `InvalidArgument` if a request cannot be opened as requested; change nothing."""

    def open(self, command: Open) -> RequestT:
        """Begin a request and post `Opened`, at the latest before the next step or before anything else of the request.

        No other request runs on its session.
        """

    def apply(self, request: RequestT, command: RequestCommand) -> None:
        """Apply a command to an open request.

        Raises:
            OutriderError: the command is refused, which ends the request unless it is a proposal, a request for
                features, or a span that `KVCacheMiss` refuses.
        """

    def refuse_proposal(self, request: RequestT, error: OutriderError) -> None:
        """Drop an invalid proposal; the request goes on without it."""

    def refuse_features(self, request: RequestT, error: OutriderError) -> None:
        """Send no features; the request goes on."""

    def close(self, request: RequestT, committed_len: int | None, error: str = "") -> None:
        """End a request.

        Args:
            request: the request; no results of it are posted any more.
            committed_len: length up to which its session may be kept; None for the last one that is known.
            error: the reason where it failed.
        """

    def distrust(self, request: RequestT) -> None:
        """Drop the session of a request that failed; `close` is called next."""

    def forget(self, session_id: str) -> None:
        """Forget a session as soon as no request runs on it."""

    def flush(self) -> None:
        """Return once everything that is written behind is written, or after a bounded time. From any thread."""
