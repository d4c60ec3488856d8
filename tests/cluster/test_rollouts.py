"""Rolling updates of each service under streams, from an earlier version's images too: no request fails."""

import json
from collections.abc import Callable
from typing import Final

import pytest

from tests.cluster.deployed import NAMESPACE, Deployed
from tests.cluster.streams import Streams, stream_during
from tests.k8s.rendering import SERVICES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_NUM_STREAMS = 20
_UPDATED_IN_TURN: Final = ("draft", "target", "draft", "orchestrator", "target", "draft", "target")
"""From all at one version to all at the other by way of all eight mixes; what is updated again goes back."""


def _note(streams: Streams, record_property: Callable[[str, object], None]) -> None:
    record_property("failed_requests", streams.num_failed)
    record_property("num_requests", len(streams.records))
    record_property("num_tokens", streams.num_tokens)
    record_property("longest_gap_s", round(streams.longest_gap_s, 2))
    assert len(streams.records) >= _NUM_STREAMS


@pytest.mark.parametrize("service", SERVICES)
async def test_no_request_fails_during_a_rolling_update(
    markov: Deployed, service: str, record_property: Callable[[str, object], None]
) -> None:
    await markov.in_thread(markov.scale_to_two)
    before = {pod["metadata"]["name"] for pod in await markov.in_thread(markov.pods, service)}

    def update() -> None:
        markov.node.kubectl("rollout", "restart", f"deployment/{service}", f"--namespace={NAMESPACE}")
        markov.until_ready(service)

    async with markov.client() as client:
        streams = await stream_during(client, _NUM_STREAMS, markov.in_thread(update))
    after = {pod["metadata"]["name"] for pod in await markov.in_thread(markov.pods, service)}
    assert len(after) == 2 and not before & after, "every pod was replaced"
    _note(streams, record_property)


async def test_every_mix_with_an_earlier_version_serves(
    markov: Deployed,
    earlier: str,
    record_property: Callable[[str, object], None],
    say: Callable[[str], None],
) -> None:
    tags = dict.fromkeys(SERVICES, earlier)
    await markov.in_thread(markov.scale_to_two)
    await markov.in_thread(markov.use_images, tags)

    def update() -> None:
        for service in _UPDATED_IN_TURN:
            tags[service] = "local" if tags[service] == earlier else earlier
            seconds = markov.use_images({service: tags[service]})
            say(f"rolling update of {service} in {seconds:.0f} s to {json.dumps(tags)}")

    try:
        async with markov.client() as client:
            streams = await stream_during(client, _NUM_STREAMS, markov.in_thread(update))
    finally:
        await markov.in_thread(markov.use_images, dict.fromkeys(SERVICES, "local"))
    _note(streams, record_property)
