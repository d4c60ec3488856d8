"""The conversion for the cluster's version: what it makes is valid there, and it changes nothing else."""

import copy
from collections.abc import Iterator

import pytest

from tests.cluster.conversion import convert
from tests.k8s.rendering import SERVICES, container, of, overlay, workloads

VALKEY = "valkey/valkey:8.1-alpine"


def test_nothing_newer_remains() -> None:
    objects = convert(overlay("local"), {}).objects
    assert not {item["apiVersion"] for item in objects} & {"autoscaling/v2", "policy/v1"}
    assert not {"grpc", "sleep"} & set(_keys(objects))
    assert {"grpc", "sleep"} <= set(_keys(overlay("local"))), "as shipped it has both"


def test_the_manifests_stay_as_they_are() -> None:
    objects = overlay("local")
    before = copy.deepcopy(objects)
    convert(objects, {VALKEY: "redis:here"})
    assert objects == before


def test_metrics_targets_and_behavior_are_as_shipped() -> None:
    objects = overlay("local")
    shipped, converted = (of(items, "HorizontalPodAutoscaler") for items in (objects, convert(objects, {}).objects))
    for name in SERVICES:
        assert converted[name]["spec"] == shipped[name]["spec"]
        assert converted[name]["apiVersion"] == "autoscaling/v2beta2"
    budgets = of(convert(objects, {}).objects, "PodDisruptionBudget")
    assert {item["apiVersion"] for item in budgets.values()} == {"policy/v1beta1"}


@pytest.mark.parametrize("service", SERVICES)
def test_probes_and_hooks_run_programs(service: str) -> None:
    shipped = container(workloads(overlay("local"))[service])
    converted = container(workloads(convert(overlay("local"), {}).objects)[service])
    for kind, times in (("startupProbe", 1), ("readinessProbe", 2), ("livenessProbe", 3)):
        probe, was = converted[kind], shipped[kind]
        if "grpc" in was:
            assert probe["exec"]["command"] == ["python", "-m", "outrider.serving", was["grpc"]["service"]]
            assert probe["timeoutSeconds"] == 10
            assert probe["periodSeconds"] == times * was.get("periodSeconds", 10)
        else:
            assert probe == was
    seconds = shipped["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert converted["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", str(seconds)]}}
    assert converted["imagePullPolicy"] == "Never"


def test_each_claim_has_a_volume_on_the_node() -> None:
    made = convert(overlay("local"), {VALKEY: "redis:here"})
    (volume,) = of(made.objects, "PersistentVolume").values()
    assert made.objects[0] is volume, "before what claims it"
    assert volume["spec"]["claimRef"] == {"namespace": "outrider", "name": "data-redis-sessions-0"}
    assert volume["spec"]["hostPath"]["path"] == str(made.folders[0])
    assert container(workloads(made.objects)["redis-sessions"])["image"] == "redis:here"


def test_what_the_version_cannot_take_is_named() -> None:
    made = convert(overlay("local"), {})
    policies = of(overlay("local"), "NetworkPolicy")
    assert sum(line.startswith("NetworkPolicy") for line in made.not_taken) == len(policies) > 0
    assert any("pod-security.kubernetes.io/enforce" in line for line in made.not_taken)
    assert len(made.changes) == len(set(made.changes)) >= 5


def test_an_operator_s_object_is_refused() -> None:
    item = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": "target"}}
    with pytest.raises(ValueError, match=r"ScaledObject target: no server has keda\.sh/v1alpha1"):
        convert([item], {})


def _keys(item: object) -> Iterator[str]:
    if isinstance(item, dict):
        yield from item
    for value in item.values() if isinstance(item, dict) else item if isinstance(item, list) else ():
        yield from _keys(value)
