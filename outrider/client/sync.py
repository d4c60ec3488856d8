"""The blocking client and its conversations, for scripts without an event loop."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from outrider.client.client import AsyncClient
from outrider.client.conversation import Conversation
from outrider.client.events import Event, Generation
from outrider.client.loop_thread import LoopThread
from outrider.client.prompt import Prompt
from outrider.client.request import GenerationRequest, Speculation
from outrider.client.retry import RetryPolicy
from outrider.parameters import SamplingParameters
from outrider.serving.tls import TlsFiles
from outrider.v1 import generation_pb2 as pb


class Client:
    """`AsyncClient` with blocking methods; arguments, results and errors are the same.

        with Client("127.0.0.1:50050") as client:
            print(client.complete("Once upon a time").text)

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
        self._client = AsyncClient(addresses, retry=retry, metadata=metadata, token=token, tls=tls, timeout_s=timeout_s)
        self._thread = LoopThread("outrider-client")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and end the thread; running calls and later ones raise `ClientClosed`."""
        self._thread.close(self._client.close)

    def generate(
        self,
        prompt: GenerationRequest | Prompt,
        parameters: SamplingParameters | None = None,
        *,
        speculation: Speculation | None = None,
        session_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Event]:
        """Yield the events of a generation; leaving the loop early stops it, as with `AsyncClient.generate`."""
        events = self._client.generate(
            prompt, parameters, speculation=speculation, session_id=session_id, timeout_s=timeout_s
        )
        return self._thread.iterate(events)

    def complete(
        self,
        prompt: GenerationRequest | Prompt,
        parameters: SamplingParameters | None = None,
        *,
        speculation: Speculation | None = None,
        session_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Return a whole generation."""
        generation = self._client.complete(
            prompt, parameters, speculation=speculation, session_id=session_id, timeout_s=timeout_s
        )
        return self._thread.run(generation)

    def conversation(
        self,
        system: str = "",
        parameters: SamplingParameters | None = None,
        *,
        speculation: Speculation | None = None,
        session_id: str | None = None,
    ) -> "SyncConversation":
        """Return a conversation in a session of its own, or in the one given; arguments as for `Conversation`."""
        conversation = self._client.conversation(system, parameters, speculation=speculation, session_id=session_id)
        return SyncConversation(conversation, self._thread)

    def cancel(self, session_id: str, request_id: str = "") -> bool:
        """End a running request; return whether one was running."""
        return self._thread.run(self._client.cancel(session_id, request_id))

    def get_session(self, session_id: str, *, with_token_ids: bool = False) -> pb.GetSessionResponse:
        """Return the session's record."""
        return self._thread.run(self._client.get_session(session_id, with_token_ids=with_token_ids))

    def delete_session(self, session_id: str) -> None:
        """Delete the session."""
        self._thread.run(self._client.delete_session(session_id))

    def list_models(self) -> pb.ListModelsResponse:
        """Return the targets and drafts."""
        return self._thread.run(self._client.list_models())


SyncClient = Client
"""The earlier name of `Client`."""


class SyncConversation:
    """`Conversation` with blocking methods; `Client.conversation` makes one.

    chat = client.conversation(system="Answer in one sentence.")
    print(chat.ask("Why is the sky blue?").text)
    """

    def __init__(self, conversation: Conversation, thread: LoopThread) -> None:
        self._conversation = conversation
        self._thread = thread

    @property
    def session_id(self) -> str:
        """The session, by which another conversation can continue it."""
        return self._conversation.session_id

    @property
    def request_id(self) -> str:
        """The running or latest request; empty before the first."""
        return self._conversation.request_id

    def ask(self, content: str, *, timeout_s: float | None = None) -> Generation:
        """Send a user message and return the whole answer."""
        return self._thread.run(self._conversation.ask(content, timeout_s=timeout_s))

    def send(self, content: str, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Send a user message and yield the events of the answer."""
        return self._thread.iterate(self._conversation.send(content, timeout_s=timeout_s))

    def cancel(self) -> bool:
        """End the running answer at its next token; return whether one was running."""
        return self._thread.run(self._conversation.cancel())

    def reset(self) -> None:
        """Delete the session and continue in a new one, without any of the messages so far."""
        self._thread.run(self._conversation.reset())
