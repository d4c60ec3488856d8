"""Pods that the cluster itself takes away: by a drain of the node, and by a kubelet that is short of memory."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.deployed import NAMESPACE, Deployed
from tests.cluster.streams import strike_streams
from tests.k8s.rendering import COMPONENT, SERVICES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_NUM_STREAMS = 8
_DRAIN_S = 8
_EVICTED_S = 120.0


@pytest.mark.parametrize("service", SERVICES)
async def test_a_drain_takes_one_pod_and_is_refused_the_other(
    markov: Deployed, service: str, record_property: Callable[[str, object], None]
) -> None:
    run, node = markov.in_thread, markov.node
    await run(markov.scale_to_two)
    before = {pod["metadata"]["name"] for pod in await run(markov.pods, service)}
    answers = []

    def drain() -> None:
        # The node stays cordoned, so that the pod that is evicted has no successor.
        selector = f"--pod-selector={COMPONENT}={service}"
        arguments = (
            "drain",
            "node",
            selector,
            "--delete-emptydir-data",
            "--ignore-daemonsets",
            f"--timeout={_DRAIN_S}s",
        )
        answers.append(node.kubectl(*arguments, timeout_s=_DRAIN_S + 30, is_checked=False))

    try:
        async with markov.client() as client:
            streams = await strike_streams(client, _NUM_STREAMS, lambda: run(drain))
        left = {pod["metadata"]["name"] for pod in await run(markov.ready_pods, service)}
        assert len(before & left) == 1, answers
        assert "Cannot evict pod as it would violate the pod's disruption budget" in answers[0]
    finally:
        await run(node.kubectl, "uncordon", "node")
    await run(markov.until_ready, service)
    record_property("failed_requests", streams.num_failed)
    record_property("num_tokens", streams.num_tokens)
    record_property("longest_gap_s", round(streams.longest_gap_s, 2))


async def test_a_kubelet_short_of_memory_evicts_a_draft(
    markov: Deployed, record_property: Callable[[str, object], None]
) -> None:
    run, node = markov.in_thread, markov.node
    await run(markov.scale_to_two)
    # What uses more than it requests goes first.
    small = {"resources": {"requests": {"memory": "16Mi"}}, "name": "draft"}
    await run(
        lambda: markov.patch(
            "deployment", "draft", {"spec": {"template": {"spec": {"containers": [small]}}}}, how="strategic"
        )
    )
    await run(markov.until_ready, "draft")
    summary = await run(node.call, "GET", "/api/v1/nodes/node/proxy/stats/summary")
    available = int(summary["node"]["memory"]["availableBytes"])
    threshold = f"{(available >> 20) + 1024}Mi"
    shipped = {pod["metadata"]["name"] for pod in await run(markov.pods, "draft")}

    def evict() -> None:
        # A soft threshold: a hard one is taken off what pods may request, and the kubelet would refuse those there are.
        node.restart_kubelet(
            evictionSoft={"memory.available": threshold},
            evictionSoftGracePeriod={"memory.available": "1s"},
            evictionMaxPodGracePeriod=30,
        )
        try:
            seconds = node.until(lambda: evicted(), "a pod was evicted", within_s=_EVICTED_S)
            record_property("evicted_s", round(seconds, 1))
        finally:
            node.restart_kubelet(evictionSoft={}, evictionSoftGracePeriod={})

    def evicted() -> list[str]:
        events = node.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=reason=Evicted")["items"]
        return [item["involvedObject"]["name"] for item in events]

    async with markov.client() as client:
        streams = await strike_streams(client, _NUM_STREAMS, lambda: run(evict))
    names = await run(evicted)
    record_property("failed_requests", streams.num_failed)
    record_property("num_tokens", streams.num_tokens)
    record_property("next_token_s", round(streams.next_token_s, 2))
    record_property("threshold", threshold)
    assert names and set(names) <= shipped, names
    await run(
        lambda: node.until(
            lambda: not has_pressure(node.call("GET", "/api/v1/nodes/node")), "no memory pressure", within_s=120
        )
    )
    await run(markov.until_ready)


def has_pressure(node: dict[str, Any]) -> bool:
    """Whether a node says that it is short of memory."""
    return any(item["type"] == "MemoryPressure" and item["status"] == "True" for item in node["status"]["conditions"])
