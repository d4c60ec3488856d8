"""A server that speaks TLS for one that does not: the embedded Valkey is built without it."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.serving.accepting import stop_accepting


@contextmanager
def tls_front(port: int, certificate: Path, key: Path, host: str = "127.0.0.1") -> Iterator[int]:
    """Yields a port of this machine's address `host` whose connections go on, without TLS, to another one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    server = run(asyncio.start_server(lambda *side: _connect(port, *side), host, 0, ssl=context))
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        run(_end(server))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    await stop_accepting(server)
    server.close()
    await server.wait_closed()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for connection in others:
        connection.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _connect(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sides = [writer]
    try:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        sides.append(behind_writer)
        await asyncio.gather(_copy(reader, behind_writer), _copy(behind_reader, writer))
    except asyncio.CancelledError:
        # asyncio's streams log an error for a connection's task that ends as cancelled.
        pass
    finally:
        for side in sides:
            # TLS would wait for the other side's goodbye, and the socket with it.
            side.transport.abort()
            with contextlib.suppress(OSError):
                await side.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
