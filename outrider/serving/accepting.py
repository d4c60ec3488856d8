"""Closes asyncio's servers without losing a connection."""

import asyncio


async def stop_accepting(server: asyncio.Server) -> None:
    """Have a server accept no more connections, so that it can be closed.

    asyncio loses a connection that it accepted in the very turn of the event loop in which the server closes: nothing
    closes the socket then, and the client waits.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    # What has been accepted becomes the server's in the next turn.
    await asyncio.sleep(0)
