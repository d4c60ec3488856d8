"""Server-sent events as a client without a library reads them."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Stream:
    """A stream that was read.

    Attributes:
        chunks: its JSON objects.
        ids: the `id:` of each.
        is_done: whether [DONE] came.
    """

    chunks: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    is_done: bool = False

    def text(self, index: int = 0) -> str:
        """The text of a choice."""
        parts = [
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for chunk in self.chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        return "".join(parts)

    def finish_reason(self, index: int = 0) -> str | None:
        """Why a choice ended."""
        reasons = [c["finish_reason"] for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]
        return next((reason for reason in reasons if reason), None)


async def read(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], *, last: str = "", num_chunks: int | None = None
) -> Stream:
    """Reads a stream, or its first chunks; then the connection is closed."""
    headers = {"Last-Event-ID": last} if last else {}
    stream, name = Stream(), ""
    async with client.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                name = line.removeprefix("id: ")
            elif line == "data: [DONE]":
                stream.is_done = True
            elif line.startswith("data: "):
                stream.chunks.append(json.loads(line.removeprefix("data: ")))
                stream.ids.append(name)
                if len(stream.chunks) == num_chunks:
                    break
    return stream
