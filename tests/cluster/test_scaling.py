"""The real autoscaling controller with the shipped metrics and targets: one pod to three under load, and back."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from outrider.errors import OutriderError
from tests.cluster.deployed import NAMESPACE, Deployed
from tests.cluster.metrics_adapter import MetricsAdapter
from tests.faults.scene import asking
from tests.k8s.rendering import COMPONENT, SERVICES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_WINDOW_S: Final = 10.0
_SHORT: Final = {"scaleUp": (0, 10), "scaleDown": (10, 10)}
"""Seconds of a direction's stabilization window, and the period of each of its policies."""
_SCALED_S: Final = 240.0
_NUM: Final = 3


@dataclass(frozen=True)
class Load:
    """What makes a service scale.

    Attributes:
        num_streams: at once.
        settings: of which service, by name.
    """

    num_streams: int
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


_SLOW: Final = "markov:vocabulary=16,order=2,seed=5,step_s=1"
LOADS: Final = {
    # More than twice 160 streams, all of them on one target. Tokens come slowly: there is one machine.
    "orchestrator": Load(360, {"target": {"OUTRIDER_MODEL": _SLOW, "OUTRIDER_MAX_SESSIONS": "512"}}),
    # All places of two pods and more.
    "target": Load(30, {"target": {"OUTRIDER_MAX_SESSIONS": "8"}}),
    # A step takes as long again for every further session.
    "draft": Load(
        16, {"draft": {"OUTRIDER_MODEL": "markov:vocabulary=16,order=2,seed=5,noise=0.2,step_s=0.002,row_s=0.004"}}
    ),
}


@pytest.fixture(scope="module")
def adapter(markov: Deployed, say: Callable[[str], None]) -> Iterator[MetricsAdapter]:
    autoscalers = [markov.get("hpa.v2beta2.autoscaling", name) for name in SERVICES]
    names = {metric["pods"]["metric"]["name"] for item in autoscalers for metric in item["spec"]["metrics"]}
    say(f"scaling: metrics are averaged over {_WINDOW_S:.0f} s, in place of a minute")
    with MetricsAdapter(markov.node, NAMESPACE, names, _WINDOW_S) as running:
        yield running


def _shortened(behavior: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a patch of an autoscaler's behavior that has other windows and periods, and nothing else."""
    changed = {}
    for direction, (window_s, period_s) in _SHORT.items():
        policies = [{**policy, "periodSeconds": period_s} for policy in behavior[direction]["policies"]]
        changed[direction] = {"stabilizationWindowSeconds": window_s, "policies": policies}
    return changed


@pytest.mark.parametrize("service", SERVICES)
async def test_from_one_to_three_and_back(
    markov: Deployed,
    adapter: MetricsAdapter,
    service: str,
    say: Callable[[str], None],
    record_property: Callable[[str, object], None],
) -> None:
    load, run = LOADS[service], markov.in_thread
    await run(lambda: markov.scale(**dict.fromkeys(SERVICES, 1)))
    for name, settings in load.settings.items():
        await run(lambda name=name, settings=settings: markov.configure(name, **settings))
    shipped = await run(markov.get, "hpa.v2beta2.autoscaling", service)
    patch = {"spec": {"minReplicas": 1, "maxReplicas": _NUM, "behavior": _shortened(shipped["spec"]["behavior"])}}
    say(f"scaling: patch of {service}: {json.dumps(patch)}")
    await run(markov.patch, "hpa.v2beta2.autoscaling", service, patch)
    targets = [metric["pods"] for metric in shipped["spec"]["metrics"]]
    record_property(
        "metrics", ",".join(f"{item['metric']['name']}:{item['target']['averageValue']}" for item in targets)
    )
    try:
        async with markov.client() as client:
            streams = [asyncio.create_task(_keep_asking(client, number)) for number in range(load.num_streams)]
            started = time.monotonic()
            try:
                await run(lambda: markov.until_replicas(service, _NUM, _SCALED_S, adapter.describe))
                record_property("decided_s", round(time.monotonic() - started, 1))
                # A target whose places are all taken is not Ready; but it serves, and says so.
                name, selector = targets[0]["metric"]["name"], f"{COMPONENT}={service}"
                await run(
                    lambda: markov.node.until(
                        lambda: len(adapter.values(name, selector)) == _NUM,
                        f"{_NUM} of {service} serve",
                        within_s=_SCALED_S,
                    )
                )
                record_property("serving_s", round(time.monotonic() - started, 1))
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
        started = time.monotonic()
        await run(lambda: markov.until_replicas(service, 1, _SCALED_S, adapter.describe))
        record_property("back_s", round(time.monotonic() - started, 1))
    finally:
        # The other overlay's settings again.
        for name, settings in load.settings.items():
            await run(lambda name=name, settings=settings: markov.unset(name, *settings))


async def _keep_asking(client: Any, number: int) -> None:
    while True:
        with suppress(OutriderError):
            async for _ in client.generate(replace(asking(seed=1000 + number, num_tokens=2000)), timeout_s=600):
                pass
        await asyncio.sleep(0.2)
