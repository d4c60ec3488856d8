"""Rolling updates of each service in turn under streams: no request fails."""

import time
from collections.abc import Callable

import pytest

from tests.cluster.deployed import NAMESPACE, Deployed
from tests.cluster.streams import stream_during
from tests.k8s.rendering import SERVICES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_NUM_STREAMS = 20


@pytest.mark.parametrize("service", SERVICES)
async def test_no_request_fails_during_a_rolling_update(
    markov: Deployed, service: str, record_property: Callable[[str, object], None]
) -> None:
    await markov.in_thread(markov.scale_to_two)
    before = {pod["metadata"]["name"] for pod in await markov.in_thread(markov.pods, service)}

    def update() -> float:
        started = time.monotonic()
        markov.node.kubectl("rollout", "restart", f"deployment/{service}", f"--namespace={NAMESPACE}")
        markov.until_ready(service)
        return time.monotonic() - started

    async with markov.client() as client:
        work = markov.in_thread(update)
        streams = await stream_during(client, _NUM_STREAMS, work)
    record_property("failed_requests", streams.num_failed)
    record_property("num_requests", len(streams.records))
    record_property("num_tokens", streams.num_tokens)
    record_property("longest_gap_s", round(streams.longest_gap_s, 2))
    after = {pod["metadata"]["name"] for pod in await markov.in_thread(markov.pods, service)}
    assert len(after) == 2 and not before & after, "every pod was replaced"
    assert len(streams.records) >= _NUM_STREAMS
