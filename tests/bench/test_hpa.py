"""The autoscaler's published rules, on cases computed by hand."""

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bench.deployed import deployed
from bench.hpa import Autoscaler, Phase, Policy, Scaler, SeenPod, quantity, recommended
from outrider.errors import InvalidArgument

LOAD = "load"
NO_WINDOWS = {"scaleUp": {"stabilizationWindowSeconds": 0}, "scaleDown": {"stabilizationWindowSeconds": 0}}


def scaler(behavior: Mapping[str, Any] | None = None, least: int = 1, most: int = 100, **averages: str) -> Scaler:
    """Returns a scaler that goes by metrics' averages; without any, by 1 of LOAD."""
    metrics = [
        {
            "type": "Pods",
            "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": average}},
        }
        for name, average in (averages or {LOAD: "1"}).items()
    ]
    spec: dict[str, Any] = {"minReplicas": least, "maxReplicas": most, "metrics": metrics}
    return Scaler.of({"spec": spec if behavior is None else {**spec, "behavior": behavior}})


def running(*values: int | None) -> list[SeenPod]:
    return [SeenPod(Phase.RUNNING, {} if value is None else {LOAD: value}) for value in values]


def asked(pods: list[SeenPod], current: int | None = None) -> int | None:
    return recommended(LOAD, 1000, pods, len(pods) if current is None else current, scaler())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """An autoscaler, and a workload whose pods are there at once and share a load."""

    def __init__(self, specification: Scaler, replicas: int) -> None:
        self.clock = Clock()
        self.autoscaler = Autoscaler(specification, self.clock)
        self.replicas = replicas

    def look(self, load: int, after_s: float = 15.0) -> int:
        """Returns the replicas after a look at a load in thousandths, of all pods together."""
        self.replicas = self.autoscaler.look(self.replicas, running(*[load // self.replicas] * self.replicas))
        self.clock.now += after_s
        return self.replicas


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("750m", "0.75"),
        ("4096", "4096"),
        ("2k", "2000"),
        ("1Ki", "1024"),
        ("0.5", "0.5"),
        ("1e3", "1000"),
        (160, "160"),
    ],
)
def test_quantities(text: str | int, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "m", "1x", "one"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="no quantity"):
        quantity(text)


def test_the_ratio_decides() -> None:
    assert asked(running(2000, 2000)) == 4, "200m of 100m: twice as many"
    assert asked(running(500, 500)) == 1, "50m: half as many"
    assert asked(running(1200, 1300, 1400)) == 4, "ceil(1.3 * 3)"


def test_a_deviation_within_a_tenth_changes_nothing() -> None:
    assert asked(running(1100, 1100)) == 2
    assert asked(running(1101, 1101)) == 3
    assert asked(running(*[900] * 20)) == 20
    assert asked(running(*[899] * 20)) == 18


def test_a_pod_without_a_value_counts_as_nothing_where_there_should_be_more() -> None:
    assert asked(running(4000, 4000, None)) == 8, "2666 of 1000 on average, ceil(2.666 * 3)"
    assert asked(running(1500, 1500, None)) == 3, "1000 on average"
    assert asked(running(1300, 1300, None, None)) == 4, "650 would turn it round"


def test_a_pod_without_a_value_counts_as_the_target_where_there_should_be_fewer() -> None:
    assert asked(running(200, 200, None)) == 2, "466 of 1000 on average, ceil(0.466 * 3)"
    assert asked(running(800, 800, None, None)) == 4, "900 is within the tolerance"


def test_a_pending_pod_dampens_a_rise_only() -> None:
    pending = SeenPod(Phase.PENDING, {LOAD: 9000})
    assert asked([*running(3000), pending]) == 3, "1500 on average, ceil(1.5 * 2)"
    assert asked([*running(500, 500), pending], current=3) == 1, "it does not count"
    assert asked([*running(1500), pending]) == 2, "750 would turn it round"


def test_more_pods_than_there_are_to_be_do_not_turn_it_round() -> None:
    assert asked(running(3000, None), current=5) == 5, "ceil(1.5 * 2) = 3 is fewer, though the ratio says more"
    assert asked(running(500, 500, 500, None), current=2) == 2, "ceil(0.625 * 4) = 3 is more, though it says fewer"


def test_pods_that_go_are_ignored() -> None:
    assert asked([*running(2000), SeenPod(Phase.TERMINATING, {LOAD: 9000})], current=1) == 2


def test_without_any_value_nothing_is_known() -> None:
    assert asked(running(None, None)) is None
    assert asked([SeenPod(Phase.PENDING, {LOAD: 1})]) is None


def test_the_metric_that_asks_for_most_counts() -> None:
    looks = Autoscaler(scaler(NO_WINDOWS, one="1", two="1"), Clock())
    assert looks.look(2, [SeenPod(Phase.RUNNING, {"one": 500, "two": 2000})] * 2) == 4


def test_a_metric_that_cannot_be_read_holds_a_fall_but_no_rise() -> None:
    looks = Autoscaler(scaler(NO_WINDOWS, one="1", two="1"), Clock())
    assert looks.look(4, [SeenPod(Phase.RUNNING, {"one": 250})] * 4) == 4
    assert looks.look(4, [SeenPod(Phase.RUNNING, {"one": 2000})] * 4) == 8
    assert looks.look(4, [SeenPod(Phase.RUNNING, {})] * 4) == 4


def test_a_rise_waits_until_its_whole_window_agrees() -> None:
    loop = Loop(scaler({"scaleUp": {"stabilizationWindowSeconds": 30}}), 1)
    # What it found when it began counts as a recommendation too.
    assert [loop.look(5000) for _ in range(3)] == [1, 1, 5]
    # The least of the window: 5 of the last look, then 6.
    assert [loop.look(load) for load in (9000, 6000, 9000, 9000, 9000)] == [5, 6, 6, 9, 9]


def test_a_fall_goes_no_further_than_the_most_of_its_window() -> None:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 60}}
    loop = Loop(scaler(behavior), 8)
    assert [loop.look(load) for load in (4000, 4000, 2000, 2000, 2000, 2000, 2000)] == [8, 8, 8, 8, 4, 2, 2]


def test_policies_bound_what_comes_in_a_period() -> None:
    policies = [
        {"type": "Percent", "value": 100, "periodSeconds": 60},
        {"type": "Pods", "value": 2, "periodSeconds": 60},
    ]
    loop = Loop(scaler({"scaleUp": {"policies": policies}}), 1)
    found = [loop.look(50_000) for _ in range(9)]
    # Two pods, since that is more than the double of one; a minute later the double of three; then of six.
    assert found == [3, 3, 3, 3, 6, 6, 6, 6, 12]


def test_policies_bound_what_goes_in_a_period() -> None:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 0, "policies": [
        {"type": "Pods", "value": 1, "periodSeconds": 120}
    ]}}  # fmt: skip
    loop = Loop(scaler(behavior), 5)
    assert [loop.look(1000) for _ in range(17)] == [4] * 8 + [3] * 8 + [2]


def test_what_came_in_a_period_may_go_in_it_too() -> None:
    behavior = {"scaleUp": {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 60}]}, "scaleDown": {
        "stabilizationWindowSeconds": 0, "policies": [{"type": "Percent", "value": 50, "periodSeconds": 60}]
    }}  # fmt: skip
    loop = Loop(scaler(behavior), 4)
    # Three came, so the period began with four: half of them.
    assert [loop.look(load) for load in (40_000, 1000)] == [7, 2]


@pytest.mark.parametrize(("select", "found"), [("Max", 9), ("Min", 5), ("Disabled", 4)])
def test_the_policy_that_is_selected(select: str, found: int) -> None:
    policies = [
        {"type": "Pods", "value": 5, "periodSeconds": 15},
        {"type": "Percent", "value": 25, "periodSeconds": 15},
    ]
    assert Loop(scaler({"scaleUp": {"policies": policies, "selectPolicy": select}}), 4).look(99_000) == found


def test_without_a_behavior_it_is_the_documented_one() -> None:
    loop = Loop(scaler(), 3)
    assert [loop.look(90_000) for _ in range(2)] == [7, 14], "four pods, or the double, every 15 s"
    # Nothing goes for five minutes, then as many as there are.
    assert [loop.look(1000) for _ in range(20)] == [14] * 19 + [1]


def test_bounds() -> None:
    assert Loop(scaler(NO_WINDOWS, most=6), 4).look(99_000) == 6
    assert Loop(scaler(NO_WINDOWS, least=2), 4).look(10) == 2
    assert Loop(scaler(NO_WINDOWS, least=2), 1).look(10) == 2
    assert Loop(scaler(NO_WINDOWS, most=6), 9).look(99_000) == 6


def test_a_tolerance_of_its_own() -> None:
    wide = scaler({"scaleUp": {"tolerance": "500m"}})
    assert recommended(LOAD, 1000, running(1500, 1500), 2, wide) == 2
    assert recommended(LOAD, 1000, running(1600, 1600), 2, wide) == 4


def test_what_cannot_be_simulated_is_refused() -> None:
    manifest = {"spec": {"maxReplicas": 2, "metrics": [{"type": "Resource", "resource": {"name": "cpu"}}]}}
    with pytest.raises(InvalidArgument, match="AverageValue"):
        Scaler.of(manifest)
    with pytest.raises(InvalidArgument, match="no type of policy"):
        Policy("Nodes", 1, 60)


def test_the_manifests_are_read() -> None:
    site = deployed()
    assert set(site.scalers) == {"target", "draft", "orchestrator"}
    target = site.scalers["target"]
    assert target.targets["outrider_kv_cache_usage_ratio"] == 750
    assert target.targets["outrider_target_queued_tokens"] == 4_096_000
    assert target.up.policies and target.down.policies
    assert site.scalers["orchestrator"].least >= 2
    assert (site.scrape_s, site.average_s) == (15, 60)
    assert site.target.drain_budget_s == 120, "of the ConfigMap, not the default"
    assert site.pre_stop_s["target"] > 0


def test_without_manifests_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="folder k8s"):
        deployed(str(tmp_path))
