"""The proxy applies the settings of its links, and its faults affect both ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing, suppress

import pytest

from bench.proxy import Link, Proxy, proxied
from outrider.serving.accepting import stop_accepting

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with proxied(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as running:
        yield running
    await stop_accepting(server)
    server.close()


async def connect(proxy: Proxy) -> Connection:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def echoed(connection: Connection, data: bytes) -> float:
    """Return the seconds until all data has returned."""
    reader, writer = connection
    began = asyncio.get_running_loop().time()
    writer.write(data)
    assert await asyncio.wait_for(reader.readexactly(len(data)), 20) == data
    return asyncio.get_running_loop().time() - began


async def test_it_carries_everything_both_ways(proxy: Proxy) -> None:
    connection = await connect(proxy)
    assert await echoed(connection, bytes(range(256)) * 10_000) < 5
    assert (proxy.num_open, proxy.num_accepted) == (1, 1)
    connection[1].write_eof()
    assert await asyncio.wait_for(connection[0].read(), 5) == b""
    connection[1].close()


async def test_latency_jitter_and_bandwidth(proxy: Proxy) -> None:
    connection = await connect(proxy)
    proxy.up.latency_s, proxy.down.latency_s = 0.05, 0.1
    assert await echoed(connection, b"x") >= 0.15
    proxy.up.latency_s = proxy.down.latency_s = 0.0
    proxy.down.jitter_s = 0.02
    data = bytes(range(256)) * 1000
    assert await echoed(connection, data) >= 0.0
    proxy.down.jitter_s = 0.0
    proxy.up.bytes_per_s = 1e6
    assert await echoed(connection, bytes(200_000)) >= 0.19
    connection[1].close()


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_partition_swallows_until_it_is_over(proxy: Proxy, way: str) -> None:
    connection = await connect(proxy)
    await echoed(connection, b"first")
    await proxy.set_blackhole(**{way: True})
    waiting = asyncio.create_task(echoed(connection, b"second"))
    done, _ = await asyncio.wait((waiting,), timeout=0.2)
    assert not done
    await proxy.set_blackhole(up=False, down=False)
    assert await waiting >= 0.2
    connection[1].close()


async def test_a_reset_reaches_both_ends_and_can_come_in_the_middle(proxy: Proxy) -> None:
    first, second = await connect(proxy), await connect(proxy)
    await echoed(first, b"a")
    await echoed(second, b"b")
    proxy.reset_after(1000)
    first[1].write(bytes(5000))
    received = b""
    with pytest.raises(ConnectionError):
        while data := await asyncio.wait_for(first[0].read(100), 5):
            received += data
        raise ConnectionResetError
    assert len(received) <= 1000
    proxy.reset()
    with pytest.raises(ConnectionError):
        if not await asyncio.wait_for(second[0].read(), 5):
            raise ConnectionResetError
    third = await connect(proxy)
    await echoed(third, b"c")
    third[1].close()


async def test_a_link_that_is_replaced_counts_for_open_connections_too(proxy: Proxy) -> None:
    connection = await connect(proxy)
    await echoed(connection, b"a")
    proxy.up = Link(latency_s=0.1)
    assert await echoed(connection, b"b") >= 0.1
    proxy.up = Link()
    await proxy.set_blackhole(down=True)
    waiting = asyncio.create_task(echoed(connection, b"c"))
    done, _ = await asyncio.wait((waiting,), timeout=0.1)
    assert not done
    await proxy.set_blackhole(down=False)
    await waiting
    connection[1].close()


async def test_it_can_refuse_and_end_slowly(proxy: Proxy) -> None:
    proxy.is_refusing = True
    refused = await connect(proxy)
    with pytest.raises(ConnectionError):
        if not await asyncio.wait_for(refused[0].read(), 5):
            raise ConnectionResetError
    proxy.is_refusing = False
    connection = await connect(proxy)
    await echoed(connection, b"a")
    proxy.up.close_delay_s = 0.2
    began = asyncio.get_running_loop().time()
    connection[1].write_eof()
    assert await asyncio.wait_for(connection[0].read(), 5) == b""
    assert asyncio.get_running_loop().time() - began >= 0.2
    connection[1].close()


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_connection_that_comes_while_it_closes_is_closed(num_turns: int) -> None:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as server:
        async with proxied(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as proxy:
            connecting = asyncio.create_task(connect(proxy))
            # It is accepted over some turns of the event loop.
            for _ in range(num_turns):
                await asyncio.sleep(0)
        with suppress(OSError):
            reader, writer = await connecting
            with closing(writer):
                assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_server_that_is_gone_closes_the_connection() -> None:
    async with proxied("127.0.0.1:1") as proxy:
        reader, writer = await connect(proxy)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
