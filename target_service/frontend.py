"""The requests of all streams in front of a target's engine: handles, fencing, admission, refusals and drains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from outrider.errors import (
    ConstraintFailed,
    Draining,
    Fenced,
    InvalidArgument,
    KVCacheMiss,
    OutriderError,
    Overloaded,
    RequestFailed,
)
from outrider.serving.engine_loop import EngineLoop
from outrider.serving.unexpected import UnexpectedErrors
from target_service.engine.commands import (
    Close,
    Command,
    EndStream,
    Forget,
    Handle,
    InvalidFrame,
    Open,
    Propose,
    RequestCommand,
    SendFeatures,
    is_gentle,
    is_optional,
)
from target_service.engine.interface import RequestT, TargetEngine
from target_service.engine.results import Refused, ResultStream
from target_service.fencing import FencingTokens

_STREAM_ENDED = "STREAM_ENDED"


@dataclass(frozen=True, slots=True, eq=False)
class _OpenRequest(Generic[RequestT]):
    session_id: str
    fencing_token: int
    request: RequestT


class Frontend(Generic[RequestT]):
    """Applies the commands of streams to the requests of one engine, and runs both in an `EngineLoop`.

    Args:
        engine: the engine; the frontend attaches itself as its host.
        max_sessions: requests open at once.
        on_failure: called, in the loop's thread, when the engine serves no session any more.

    Attributes:
        loop: runs the engine, and takes commands.
    """

    def __init__(
        self, engine: TargetEngine[RequestT], max_sessions: int, on_failure: Callable[[], object] = lambda: None
    ) -> None:
        self._engine = engine
        self._max_sessions = max_sessions
        self._fencing = FencingTokens()
        self._requests: dict[Handle, _OpenRequest[RequestT]] = {}
        self._unexpected = UnexpectedErrors()
        self.loop: EngineLoop[Command] = EngineLoop(self, engine, name="engine", on_failure=on_failure)
        engine.attach(self)

    def start(self) -> None:
        """Prepare the engine, then start its thread."""
        self._engine.start()
        self.loop.start()

    @property
    def num_sessions(self) -> int:
        """Requests that are open. From any thread."""
        return len(self._requests)

    def flush(self) -> None:
        """Return once everything that the engine writes behind is written, or after a bounded time. From any thread."""
        self._engine.flush()

    def run_in_engine(self, fn: Callable[[], object]) -> None:
        """Have the engine's thread call a function before its next step, from any thread."""
        self.loop.run_in_engine(fn)

    # The loop's thread calls the following methods.

    def apply(self, command: Command) -> None:
        """Apply a command; see `CommandHandler`."""
        try:
            self._apply(command)
        except OutriderError:
            raise
        except ValueError as error:
            raise InvalidArgument(str(error), "frame") from error

    def refuse(self, command: Command, error: OutriderError) -> None:
        """Refuse a command; this ends its request unless the request goes on without the command."""
        if isinstance(command, EndStream):
            return
        if not is_optional(command):
            self._refuse(command.handle, error)
        elif (opened := self._requests.get(command.handle)) is None:
            self._engine.load.num_stale_messages += 1
        elif isinstance(command, SendFeatures) or (isinstance(command, InvalidFrame) and command.kind == "features"):
            self._engine.refuse_features(opened.request, error)
        else:
            self._engine.refuse_proposal(opened.request, error)

    def fail(self, command: Command, error: Exception) -> None:
        """End the request whose command raised an unexpected exception, and no other."""
        if isinstance(command, EndStream):
            self.loop.failures.record("a stream could not be ended", error)
            return
        opened = self._requests.get(command.handle)
        if opened is None or is_optional(command):
            self.refuse(command, self._unexpected.named("the frame failed", error))
        else:
            self.fail_request(opened.request, error)

    def fail_request(self, request: RequestT, error: Exception) -> None:
        """End a request that failed by itself; see `EngineHost`."""
        if isinstance(error, ConstraintFailed | InvalidArgument):
            # The request's own doing, whatever the device does: the session is sound.
            self._refuse(request.handle, error)
            return
        self.loop.failures.record("a request failed", error, **request.log_fields)
        # First, so that there is memory for the probe.
        self._engine.distrust(request)
        self.loop.failures.settle()
        failure = error if isinstance(error, OutriderError) else RequestFailed("the request failed on this target")
        self._refuse(request.handle, failure)

    def apply_gentle(self) -> None:
        """Apply the commands that came during a pass and change nothing that it was made of."""
        self.loop.apply_commands(is_gentle)

    def hand_over(self) -> None:
        """Refuse the requests that still run, so that they go on at another target, which restores their KV blocks."""
        self._engine.flush()
        for handle in list(self._requests):
            self._refuse(handle, Draining("this target is shutting down"))

    def _apply(self, command: Command) -> None:
        match command:
            case Open():
                self._open(command)
            case Close(handle, committed_len):
                if (opened := self._requests.pop(handle, None)) is not None:
                    self._engine.close(opened.request, committed_len)
            case Forget(_, session_id):
                self._engine.forget(session_id)
            case InvalidFrame(_, _, error):
                raise error
            case EndStream(stream):
                self.end_stream(stream)
            case _:
                self._apply_to_request(command)

    def _open(self, command: Open) -> None:
        if self.loop.is_draining:
            raise Draining("this target is shutting down")
        if command.handle in self._requests:
            raise InvalidArgument(f"handle {command.handle.number} is open already", "handle")
        if len(self._requests) >= self._max_sessions:
            raise Overloaded(f"{len(self._requests)} sessions are generating, the limit", retry_after_s=1.0)
        self._engine.check(command)
        self._fencing.check(command.session_id, command.fencing_token)
        for handle in [key for key, item in self._requests.items() if item.session_id == command.session_id]:
            self._refuse(handle, Fenced("a newer request took the session over"))
        request = self._engine.open(command)
        self._requests[command.handle] = _OpenRequest(command.session_id, command.fencing_token, request)

    def _apply_to_request(self, command: RequestCommand) -> None:
        opened = self._requests.get(command.handle)
        if opened is None or _is_fenced(command, opened.fencing_token):
            self._engine.load.num_stale_messages += 1
        else:
            self._engine.apply(opened.request, command)

    def end_stream(self, stream: ResultStream) -> None:
        """End all requests of a stream that has ended."""
        for handle in [handle for handle in self._requests if handle.stream is stream]:
            self._engine.close(self._requests.pop(handle).request, None, _STREAM_ENDED)

    def _refuse(self, handle: Handle, error: OutriderError) -> None:
        """End a request with an error. After KV_CACHE_MISS it stays open for an earlier span."""
        if error.reason != KVCacheMiss.reason:
            opened = self._requests.pop(handle, None)
            if opened is not None:
                self._engine.close(opened.request, None, error.reason)
        handle.stream.post(Refused(handle.number, error))


def _is_fenced(command: RequestCommand, fencing_token: int) -> bool:
    return isinstance(command, Propose) and command.part.base.fencing_token != fencing_token
