"""A conversation of many turns: only new messages travel, the session keeps the rest on a warm KV cache."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.client.events import Accepted, Event, Generation, collected
from outrider.client.request import GenerationRequest, Message, Speculation
from outrider.parameters import SamplingParameters

if TYPE_CHECKING:
    from outrider.client.client import AsyncClient


@dataclass(slots=True)
class Conversation:
    """A conversation with the model, held in one session.

        conversation = client.conversation(system="Answer in one sentence.")
        print((await conversation.ask("Why is the sky blue?")).text)

    Attributes:
        client: sends the requests.
        system: system message sent ahead of the first turn; empty for none.
        parameters: sampling parameters and limits of every answer.
        speculation: how to speculate.
        session_id: the session; drawn where not given. One that exists already is continued.
        request_id: the running or latest request; empty before the first.
    """

    client: AsyncClient
    system: str = ""
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    speculation: Speculation = field(default_factory=Speculation)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    request_id: str = ""
    _has_begun: bool = False

    async def ask(self, content: str, *, timeout_s: float | None = None) -> Generation:
        """Send a user message and return the whole answer; errors as for `AsyncClient.generate`."""
        return await collected(self.send(content, timeout_s=timeout_s))

    async def send(self, content: str, *, timeout_s: float | None = None) -> AsyncGenerator[Event, None]:
        """Send a user message and yield the events of the answer; errors as for `AsyncClient.generate`."""
        request = self._request(content)
        self.request_id = request.request_id
        async with aclosing(self.client.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                self._has_begun |= isinstance(event, Accepted)
                yield event

    async def cancel(self) -> bool:
        """End the running answer at its next token; return whether one was running."""
        return await self.client.cancel(self.session_id, self.request_id)

    async def reset(self) -> None:
        """Delete the session and continue in a new one, without any of the messages so far."""
        if self._has_begun:
            await self.client.delete_session(self.session_id)
        self.session_id, self.request_id, self._has_begun = uuid.uuid4().hex, "", False

    def _request(self, content: str) -> GenerationRequest:
        opening = [Message("system", self.system)] if self.system and not self._has_begun else []
        return GenerationRequest(
            messages=[*opening, Message("user", content)],
            parameters=self.parameters,
            speculation=self.speculation,
            session_id=self.session_id,
        )
