"""The HTTP address that tells metrics."""

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

import outrider
from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.metrics import MetricsServer, Readings, RecentRatio, counter, gauge, new_registry
from outrider.serving.server import Server
from outrider.serving.settings import ServingSettings


def read(address: str) -> dict[str, float]:
    """Returns all samples told at an address, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def told(address: str) -> dict[str, float]:
    return await asyncio.to_thread(read, address)


async def test_every_process_tells_what_it_is_and_takes() -> None:
    server = Server(ServingSettings(metrics_address="127.0.0.1:0"), name="told")
    await server.start()
    try:
        samples = await told(server.metrics_address)
        assert samples[f"outrider_build_info,service=told,version={outrider.__version__}"] == 1
        assert samples["process_cpu_seconds_total"] > 0
        assert samples["outrider_draining"] == 0
        assert not any(name.endswith("_created") for name in samples)
    finally:
        await server.stop()
    with pytest.raises(urllib.error.URLError):
        await told(server.metrics_address)


async def test_no_address_tells_nothing() -> None:
    server = Server(ServingSettings(), name="told")
    await server.start()
    assert server.metrics_address == ""
    await server.stop()


async def test_readings_are_of_now() -> None:
    registry = CollectorRegistry()
    numbers = [1.0]
    registry.register(Readings(lambda: [counter("seen", "Seen.", numbers[0]), gauge("now", "Now.", -numbers[0])]))
    Counter("outrider_counted", "Counted.", registry=registry).inc(3)
    server = MetricsServer("127.0.0.1:0", registry)
    address = server.start()
    try:
        assert await told(address) == {"outrider_seen_total": 1, "outrider_now": -1, "outrider_counted_total": 3}
        numbers[0] = 5.0
        assert (await told(address))["outrider_seen_total"] == 5
    finally:
        server.close()
        server.close()


def test_a_recent_ratio_forgets() -> None:
    now, part, whole = [0.0], [0.0], [0.0]
    ratio = RecentRatio(lambda: (part[0], whole[0]), window_s=60.0, clock=lambda: now[0])
    assert ratio() == 0.0
    for _ in range(8):
        now[0] += 15
        part[0] += 3
        whole[0] += 4
        assert ratio() == 0.75
    for expected in (0.5625, 0.375, 0.1875, 0.0):
        now[0] += 15
        whole[0] += 4
        assert ratio() == expected
    now[0] += 1000
    assert ratio() == 0.0, "nothing happened"


def test_a_wrong_address_is_named() -> None:
    for address in ("9090", "127.0.0.1", "127.0.0.1:x"):
        with pytest.raises(InvalidArgument, match="not host:port"):
            MetricsServer(address, new_registry("told"))


def test_an_address_in_use_is_named() -> None:
    one = MetricsServer("127.0.0.1:0", new_registry("told"))
    address = one.start()
    try:
        with pytest.raises(Unavailable, match=address):
            MetricsServer(address, new_registry("told")).start()
    finally:
        one.close()
