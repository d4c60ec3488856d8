"""Pods that are deleted and processes that are killed under streams: nothing is lost, doubled or changed."""

from collections.abc import Callable

import pytest

from tests.cluster.deployed import Deployed, Pod
from tests.cluster.streams import strike_streams
from tests.k8s.rendering import SERVICES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_NUM_STREAMS = 8
# Much longer than it takes; a stream that hangs until something times out is found by it.
_NEXT_TOKEN_S = 40.0


@pytest.mark.parametrize("how", ["deleted", "killed"])
@pytest.mark.parametrize("service", SERVICES)
async def test_streams_go_on_without_a_pod(
    markov: Deployed, service: str, how: str, record_property: Callable[[str, object], None]
) -> None:
    await markov.in_thread(markov.scale_to_two)
    victim: Pod = {}

    async def strike() -> None:
        victim.update(await markov.in_thread(markov.busiest, service))
        await markov.in_thread(markov.delete if how == "deleted" else markov.kill, victim)

    async with markov.client() as client:
        streams = await strike_streams(client, _NUM_STREAMS, strike)
    record_property("failed_requests", streams.num_failed)
    record_property("num_tokens", streams.num_tokens)
    record_property("next_token_s", round(streams.next_token_s, 2))
    record_property("longest_gap_s", round(streams.longest_gap_s, 2))
    record_property("ready_again_s", round(await markov.in_thread(markov.until_ready, service), 1))
    name, (before,) = victim["metadata"]["name"], victim["status"]["containerStatuses"]
    now = {pod["metadata"]["name"]: pod for pod in await markov.in_thread(markov.pods, service)}
    if how == "deleted":
        assert name not in now
    else:
        assert now[name]["status"]["containerStatuses"][0]["restartCount"] > before["restartCount"]
    assert 0 < streams.next_token_s < _NEXT_TOKEN_S
