"""The blocking client, for scripts without an event loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from outrider.client.client import OutriderClient
from outrider.client.events import Event, Generation
from outrider.client.request import GenerationRequest
from outrider.client.retry import RetryPolicy
from outrider.serving.tls import TlsFiles
from outrider.v1 import generation_pb2 as pb

T = TypeVar("T")


class SyncClient:
    """`OutriderClient` with blocking methods; arguments, results and errors are the same.

        with SyncClient("127.0.0.1:50050") as client:
            print(client.complete(GenerationRequest(text="Once upon a time")).text)

    It runs an event loop in a thread of its own until `close`; its methods may be called from any other thread.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        retry: RetryPolicy | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        token: str = "",
        tls: TlsFiles | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()
        self._client = OutriderClient(
            addresses, retry=retry, metadata=metadata, token=token, tls=tls, timeout_s=timeout_s
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and end the thread; closing twice does nothing more."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Yield the events of a generation; leaving the loop early stops it, as with `OutriderClient.generate`."""
        events = self._client.generate(request, timeout_s=timeout_s)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            self._run(events.aclose())

    def complete(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Generation:
        """Return a whole generation."""
        return self._run(self._client.complete(request, timeout_s=timeout_s))

    def cancel(self, session_id: str, request_id: str = "") -> bool:
        """End a running request; return whether one was running."""
        return self._run(self._client.cancel(session_id, request_id))

    def get_session(self, session_id: str, *, with_token_ids: bool = False) -> pb.GetSessionResponse:
        """Return the session's record."""
        return self._run(self._client.get_session(session_id, with_token_ids=with_token_ids))

    def delete_session(self, session_id: str) -> None:
        """Delete the session."""
        self._run(self._client.delete_session(session_id))

    def list_models(self) -> pb.ListModelsResponse:
        """Return the targets and drafts."""
        return self._run(self._client.list_models())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of the calling thread must end the work in the other one too.
            future.cancel()
            raise


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)
