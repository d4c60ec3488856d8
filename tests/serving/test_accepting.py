"""A server that closes loses no connection, whenever it came."""

import asyncio
from contextlib import closing, suppress

import pytest

from outrider.serving.accepting import stop_accepting


@pytest.mark.parametrize("num_turns", range(12))
async def test_what_comes_while_a_server_closes_is_answered_or_refused(num_turns: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            writer.write(b"answer")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    connecting = asyncio.create_task(asyncio.open_connection(host, port))
    # It is accepted over some turns of the event loop.
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await stop_accepting(server)
    server.close()
    # Where it was not accepted, the system refuses or resets it.
    with suppress(OSError):
        reader, writer = await connecting
        with closing(writer):
            assert await asyncio.wait_for(reader.read(), 5) == b"answer"
