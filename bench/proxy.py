"""A TCP proxy with injected latency, bandwidth limits and faults, for benchmarks and fault tests.

Each direction has its own latency, jitter and bandwidth, and can be a blackhole; all can be changed while connections
are open. Connections can be reset, also in the middle of a message.
"""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from outrider.serving.accepting import stop_accepting

_READ_BYTES: Final = 64 << 10
_MAX_PARTS: Final = 256
"""Maximum parts in flight per direction of a connection: 16 MiB; then the sender is blocked."""
_ABORT: Final = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Link:
    """The settings of one direction.

    Attributes:
        latency_s: one-way latency, in seconds.
        jitter_s: maximum additional latency, in seconds, uniformly distributed; the order of data is kept.
        bytes_per_s: bandwidth of each connection, in bytes per second; 0 for unlimited.
        is_blackhole: whether data is held back; it arrives when the blackhole ends, as TCP retransmits it.
        close_delay_s: additional latency of the end of a stream, in seconds.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    is_blackhole: bool = False
    close_delay_s: float = 0.0


class Proxy:
    """A proxy in front of a server; see the module.

    Args:
        server: address of the server, host:port.
        seed: seed of the jitter.

    Attributes:
        up: direction from clients to the server.
        down: direction from the server to clients.
        is_refusing: whether new connections are closed at once.
        num_accepted: number of accepted connections.
    """

    def __init__(self, server: str, seed: int = 0) -> None:
        host, _, port = server.rpartition(":")
        self._host, self._port = host, int(port)
        self._random = random.Random(seed)
        self._listener: asyncio.Server | None = None
        self._changed = asyncio.Condition()
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.up = Link()
        self.down = Link()
        self.is_refusing = False
        self._is_closed = False
        self.num_accepted = 0
        self.address = ""

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._pairs)

    async def start(self) -> str:
        """Start to listen on a free loopback port; return the address."""
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_READ_BYTES)
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self.address

    async def close(self) -> None:
        """Close all connections and stop to listen."""
        self._is_closed = True
        if self._listener is not None:
            await stop_accepting(self._listener)
            self._listener.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Reset all connections, as after a restart of a node."""
        for pair in list(self._pairs):
            pair.abort()

    def reset_after(self, num_bytes: int) -> None:
        """Reset each open connection after `num_bytes` more bytes from the server, possibly within a message."""
        for pair in self._pairs:
            pair.bytes_left = num_bytes

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_accepted += 1
        try:
            # One that was accepted just before the end begins after it.
            if self.is_refusing or self._is_closed:
                _abort(writer)
                return
            # asyncio's streams log an error for a connection task that ends as cancelled.
            with suppress(OSError, asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port, limit=_READ_BYTES)
        pair = _Pair(writer, far_writer)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer, lambda: self.up, None))
                group.create_task(self._forward(far_reader, writer, lambda: self.down, pair))
        except* (OSError, asyncio.IncompleteReadError):
            pair.abort()
        finally:
            self._pairs.discard(pair)
            far_writer.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        link: Callable[[], Link],
        counted: "_Pair | None",
    ) -> None:
        """Forward one direction of a connection; reset `counted` when its bytes are used up."""
        parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_PARTS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(reader, parts, link))
            group.create_task(self._send(writer, parts, link, counted))

    async def _receive(
        self, reader: asyncio.StreamReader, parts: asyncio.Queue[tuple[float, bytes]], link: Callable[[], Link]
    ) -> None:
        loop = asyncio.get_running_loop()
        free_at = due = loop.time()
        while True:
            data = await reader.read(_READ_BYTES)
            now, is_now = loop.time(), link()
            free_at = max(free_at, now) + (len(data) / is_now.bytes_per_s if is_now.bytes_per_s else 0.0)
            # Not before data that was sent earlier.
            due = max(due, free_at + is_now.latency_s + self._random.uniform(0.0, is_now.jitter_s))
            await parts.put((due if data else due + is_now.close_delay_s, data))
            if not data:
                return

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        parts: asyncio.Queue[tuple[float, bytes]],
        link: Callable[[], Link],
        counted: "_Pair | None",
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await parts.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if link().is_blackhole:
                async with self._changed:
                    await self._changed.wait_for(lambda: not link().is_blackhole)
            if not data:
                with suppress(OSError):
                    writer.write_eof()
                return
            if counted is not None and counted.bytes_left is not None:
                data = data[: counted.bytes_left]
                counted.bytes_left -= len(data)
            writer.write(data)
            await writer.drain()
            if counted is not None and counted.bytes_left == 0:
                counted.abort()
                return

    async def set_blackhole(self, *, up: bool | None = None, down: bool | None = None) -> None:
        """Begin or end a partition; None leaves a direction unchanged."""
        async with self._changed:
            self.up.is_blackhole = self.up.is_blackhole if up is None else up
            self.down.is_blackhole = self.down.is_blackhole if down is None else down
            self._changed.notify_all()


class _Pair:
    """The client's and the server's end of a connection."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._writers = (near, far)
        self.bytes_left: int | None = None

    def abort(self) -> None:
        for writer in self._writers:
            _abort(writer)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection by a TCP reset; data in flight is lost."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    writer.transport.abort()


@asynccontextmanager
async def proxied(server: str, seed: int = 0) -> AsyncIterator[Proxy]:
    """Run a `Proxy` for the duration of the context."""
    proxy = Proxy(server, seed)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
