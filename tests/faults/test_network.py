"""Faults 29 to 33: links that fail in every way, between every pair."""

import asyncio
from dataclasses import replace

import pytest

from bench.proxy import Proxy
from outrider.client import OutriderClient
from outrider.client.retry import RetryPolicy
from outrider.serving.channel import open_channel
from tests.faults.history import check, read_log, watch
from tests.faults.scene import Scene, asking, plain
from tests.faults.stack import FaultOptions, fault_stack

PAIRS = ("client-orchestrator", "orchestrator-target", "orchestrator-draft", "orchestrator-redis")
WAYS = {"up": {"up": True}, "down": {"down": True}, "both": {"up": True, "down": True}}


async def proxies(scene: Scene, pair: str) -> list[Proxy]:
    """Returns the proxies of a pair; of those that a stream may use, the one that it does."""
    stack = scene.stack
    if pair == "orchestrator-target":
        return [stack.to_targets[(await scene.serving())[0]]]
    return {
        "client-orchestrator": stack.to_orchestrators,
        "orchestrator-draft": stack.to_drafts,
        "orchestrator-redis": [stack.to_redis],
    }[pair]


# In both ways in every run; in one way alone in `make faults`.
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow if way != "both" else ()) for way in WAYS])
@pytest.mark.parametrize("pair", PAIRS)
async def test_fault_29_partition(scene: Scene, pair: str, way: str) -> None:
    async def strike() -> None:
        cut = await proxies(scene, pair)
        for proxy in cut:
            await proxy.set_blackhole(**WAYS[way])

        async def mend() -> None:
            # Longer than what watches over the link waits.
            await asyncio.sleep(2.5)
            for proxy in cut:
                await proxy.set_blackhole(up=False, down=False)

        mending.append(asyncio.create_task(mend()))

    mending: list[asyncio.Task[None]] = []
    request = asking(num_tokens=200)
    # A client that hears nothing notices by its pings, which come every second here.
    async with _watchful(scene) as client:
        record = await scene.survive(strike, request=request, client=client, within_s=40)
    await asyncio.gather(*mending)
    assert record.longest_gap_s < 12
    # Without a draft tokens come by plain decoding; and upwards a target, within its window, and a client's stream have
    # nothing to wait for.
    if pair == "orchestrator-redis" or (pair != "orchestrator-draft" and way != "up"):
        assert record.longest_gap_s > 0.4


def _watchful(scene: Scene) -> OutriderClient:
    return OutriderClient(
        [proxy.address for proxy in scene.stack.to_orchestrators],
        retry=RetryPolicy(max_attempts=60, max_backoff_s=0.5),
        connect=lambda address: open_channel(address, keepalive_s=1),
    )


async def test_fault_30_latency_and_jitter(scene: Scene) -> None:
    for proxy in scene.stack.proxies:
        for link in (proxy.up, proxy.down):
            link.latency_s, link.jitter_s = 0.01, 0.02
    record = await scene.survive(lambda: None, after=0, request=asking(num_tokens=60))
    assert record.longest_gap_s < 3


@pytest.mark.parametrize("pair", PAIRS)
async def test_fault_31_reset_mid_frame(scene: Scene, pair: str) -> None:
    async def strike() -> None:
        for proxy in await proxies(scene, pair):
            proxy.reset_after(7)

    record = await scene.survive(strike)
    assert record.longest_gap_s < 4


@pytest.mark.slow
async def test_fault_32_goaway(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> None:
    aged = {"OUTRIDER_MAX_CONNECTION_AGE_S": "1"}
    options = FaultOptions(
        num_targets=1, num_drafts=0, num_orchestrators=1, target_environment=aged, orchestrator_environment=aged
    )
    request = asking(num_tokens=700)
    await scene.learn(request)
    async with fault_stack(tmp_path_factory.mktemp("aged"), options) as stack, stack.client() as client:
        record = await watch(client, request)
        assert record.error is None, record.error
        await read_log(client, record)
    check([record], plain)
    assert record.longest_gap_s < 3


@pytest.mark.slow
async def test_fault_33_clock_skew_between_replicas(scene: Scene) -> None:
    """An orchestrator whose clock is a day ahead takes over from one whose clock is right, and the other way round."""
    async with scene.stack.another("tests.faults.skewed", OUTRIDER_LEASE_S="2") as skewed:
        for first, second in ((skewed, scene.stack.orchestrators[0]), (scene.stack.orchestrators[0], skewed)):
            request = asking(num_tokens=200)
            await scene.learn(request)
            async with (
                scene.stack.client(first.address, max_attempts=1) as one,
                scene.stack.client(second.address) as two,
            ):
                begun = asyncio.Event()
                older = asyncio.create_task(watch(one, request, after=20, strike=begun.set))
                await asyncio.wait_for(begun.wait(), 20)
                older.cancel()
                await asyncio.gather(older, return_exceptions=True)
                newer = await watch(two, replace(request, resume_offset=0))
                assert newer.error is None, newer.error
                await read_log(two, newer)
            check([newer], plain)
