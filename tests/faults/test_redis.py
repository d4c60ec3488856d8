"""Faults 20 to 27: nothing is emitted that the store has not; what it cannot keep is said, not glossed over."""

import asyncio
import time
from dataclasses import replace

import redis.asyncio

from outrider.errors import OutriderError, Overloaded, SessionNotFound, Unavailable
from tests.faults.history import Record, check, watch
from tests.faults.scene import Scene, asking, plain
from tests.faults.stack import resume, stop


async def test_fault_20_down_at_start(scene: Scene) -> None:
    request = asking()
    async with (
        scene.stack.another(OUTRIDER_REDIS_URL="redis://127.0.0.1:1/0") as process,
        scene.stack.client(process.address, max_attempts=1) as client,
    ):
        began = time.monotonic()
        record = await watch(client, request)
        assert isinstance(record.error, Unavailable)
        assert time.monotonic() - began < 5
    await scene.survive(lambda: None, after=0, request=request)


async def _broken(scene: Scene, strike: object, error: type[OutriderError] = Unavailable) -> Record:
    """Breaks the store in the middle of a stream, which must end soon, and with this error."""
    request = asking(num_tokens=400)
    await scene.learn(request)
    process = scene.stack.orchestrators[0]
    async with scene.stack.client(process.address, max_attempts=1) as client:
        struck: list[float] = []

        def note() -> object:
            struck.append(time.monotonic())
            return strike()  # type: ignore[operator]

        record = await watch(client, request, after=30, strike=note)
    assert isinstance(record.error, error), record.error
    ended_s = time.monotonic() - struck[0]
    scene.note("ended_after_s", round(ended_s, 2))
    assert ended_s < 6
    return record


async def test_fault_21_down_mid_stream(scene: Scene) -> None:
    async def strike() -> None:
        # While an earlier write is on its way to the disk, a server that syncs every second holds later ones back.
        await scene.stack.to_redis.set_blackhole(up=True)
        async with redis.asyncio.Redis.from_url(scene.stack.redis.url) as raw, asyncio.timeout(10):
            while (await raw.info("persistence"))["aof_buffer_length"]:
                await asyncio.sleep(0.01)
        scene.stack.redis.kill()
        await scene.stack.to_redis.set_blackhole(up=False)

    record = await _broken(scene, strike)
    scene.stack.redis.start()
    await scene.resumed(record)


async def test_fault_22_restart_with_aof(scene: Scene) -> None:
    async def strike() -> None:
        scene.stack.redis.stop()
        scene.stack.redis.start()

    await scene.survive(strike)


async def test_fault_23_a_failover_that_lost_the_last_writes(scene: Scene) -> None:
    async with redis.asyncio.Redis.from_url(scene.stack.redis.url) as raw:
        await raw.flushall()
        request = asking(num_tokens=300)
        await scene.learn(request)
        await raw.flushall()

        async def strike() -> None:
            # What a replica has that is a little behind.
            (log,), (session,) = await raw.keys("*:log"), await raw.keys("*:session")
            async with raw.pipeline(transaction=True) as both:
                values = await both.get(log).hget(session, "committed_len").execute()
            await asyncio.sleep(0.1)
            length = int(values[1])
            async with raw.pipeline(transaction=True) as both:
                await both.set(log, values[0]).hset(session, "committed_len", str(length)).execute()

        record = await scene.survive(strike, request=request)
        assert record.statistics.num_fallbacks["session_restored"] >= 1


async def test_fault_24_maxmemory(scene: Scene) -> None:
    async with redis.asyncio.Redis.from_url(scene.stack.redis.url) as raw:
        try:

            async def strike() -> None:
                await raw.config_set("maxmemory", 1)

            await raw.flushall()
            record = await _broken(scene, strike, Overloaded)
            assert isinstance(record.error, Overloaded)
            assert record.error.retry_after_s > 0
        finally:
            await raw.config_set("maxmemory", 0)
    await scene.resumed(record)


async def test_fault_25_the_ttl_expires_mid_generation(scene: Scene) -> None:
    request = asking(num_tokens=300)
    async with (
        scene.stack.another(OUTRIDER_SESSION_TTL_S="1") as process,
        scene.stack.client(process.address, max_attempts=1) as client,
    ):
        # Commits renew it: a stream of two seconds outlives a TTL of one.
        await scene.learn(request)
        record = await watch(client, request)
        check([record], plain)

        async def strike() -> None:
            # Nothing is renewed for longer than the TTL.
            stop(process)
            await asyncio.sleep(1.6)
            resume(process)

        again = replace(request, request_id="", session_id="forced")
        record = await watch(client, again, after=30, strike=strike)
        assert isinstance(record.error, SessionNotFound), record.error
        check([record], plain)


async def test_fault_26_slow_or_hung(scene: Scene) -> None:
    scene.stack.to_redis.down.latency_s = 0.1
    await scene.survive(lambda: None, after=0)
    record = await _broken(scene, lambda: stop(scene.stack.redis))
    resume(scene.stack.redis)
    await scene.resumed(record)


async def test_fault_27_flushall_and_noscript(scene: Scene) -> None:
    async with redis.asyncio.Redis.from_url(scene.stack.redis.url) as raw:
        record = await scene.survive(raw.script_flush)
        assert record.num_terminal == 1

        async def strike() -> None:
            await raw.flushall()

        # The live owner writes it again, so that it goes on, and can be asked for at the end.
        record = await scene.survive(strike, request=asking(seed=4, num_tokens=600))
        assert record.statistics.num_fallbacks["session_restored"] == 1
