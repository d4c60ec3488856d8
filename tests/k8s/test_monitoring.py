"""Whatever scales, alerts or is drawn goes by metrics that the services tell."""

import json
import re
from collections.abc import Iterator

import pytest
import yaml
from prometheus_client import CollectorRegistry

from draft_service import metrics as draft_metrics
from draft_service.engine.engine import Engine as DraftEngine
from draft_service.engine.load import EngineLimits
from draft_service.settings import DraftSettings
from k8s import dashboard
from orchestrator.api.admission import Admission
from orchestrator.gauges import register_gauges
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.settings import OrchestratorSettings
from orchestrator.workers.replicas import Replicas
from outrider.drafters.ngram import NgramDrafter
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.serving.metrics import new_registry
from target_service import metrics as target_metrics
from target_service.engine.engine import Engine as TargetEngine
from target_service.settings import TargetSettings
from tests.k8s.rendering import K8S, of, overlay, strings

DOCS = K8S.parent / "docs" / "operations.md"
MONITORING = K8S / "components" / "monitoring"
KEDA = K8S / "components" / "keda" / "scaled-objects.yaml"
_NAME = re.compile(r"\b(?:outrider|process)_[a-z_]+\b")
_SERVERS_OWN = {"outrider_draining", "outrider_kv_blocks_total"}
"""Told by servers, and by targets with KV blocks, which are not made here."""


async def orchestrator_registry() -> CollectorRegistry:
    registry = new_registry("orchestrator")
    OrchestratorMetrics(registry)
    register_gauges(registry, Admission(1, 1, 1.0), Replicas(OrchestratorSettings()))
    return registry


def target_registry() -> CollectorRegistry:
    registry, settings = new_registry("target"), TargetSettings(model="markov:vocabulary=5,order=1")
    model = load_model(settings.model, LoadOptions()).model
    target_metrics.watch(registry, TargetEngine(model, settings), settings.max_sessions)
    return registry


def draft_registry() -> CollectorRegistry:
    registry = new_registry("draft")
    drafter = NgramDrafter(shortest=1, longest=3, budget_bytes=1 << 20, max_session_len=64)
    limits = EngineLimits(max_sessions=1, max_cached_sessions=1, idle_ttl_s=1.0)
    draft_metrics.watch(registry, DraftEngine(drafter, limits), DraftSettings())
    return registry


def names(registry: CollectorRegistry) -> set[str]:
    """Returns the names of all samples, with those that a metric with labels has once it is used."""
    found = set()
    for family in registry.collect():
        found |= {sample.name for sample in family.samples}
        if family.type == "counter":
            found.add(f"{family.name}_total")
        if family.type == "histogram":
            found |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
        found.add(family.name)
    return found


@pytest.fixture
async def told() -> set[str]:
    return names(await orchestrator_registry()) | names(target_registry()) | names(draft_registry()) | _SERVERS_OWN


def asked(texts: Iterator[str]) -> set[str]:
    return {name for text in texts for name in _NAME.findall(text)}


async def test_what_is_drawn_is_told(told: set[str]) -> None:
    found = asked(strings(json.loads((MONITORING / "dashboard.json").read_text())))
    assert len(found) > 30
    assert found <= told


async def test_alerts_go_by_what_is_told_and_are_explained(told: set[str]) -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
    text = DOCS.read_text()
    for rule in group["rules"]:
        assert asked(iter([rule["expr"]])) <= told, rule["alert"]
        assert f"### {rule['alert']}\n" in text, "what it means, and what to do"
        assert rule["annotations"]["summary"]


async def test_signals_for_scaling_are_told_and_adapted(told: set[str]) -> None:
    scalers = of(overlay("production"), "HorizontalPodAutoscaler").values()
    signals = {metric["pods"]["metric"]["name"] for item in scalers for metric in item["spec"]["metrics"]}
    assert len(signals) == 6
    assert signals <= told
    (rule,) = yaml.safe_load((MONITORING / "adapter-rules.yaml").read_text())
    series = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    assert series is not None
    assert all(re.fullmatch(series[1], signal) for signal in signals)
    queries = {
        trigger["metadata"]["query"]: trigger["metadata"]["threshold"]
        for item in yaml.safe_load_all(KEDA.read_text())
        for trigger in item["spec"]["triggers"]
    }
    assert asked(iter(queries)) == signals, "KEDA goes by the same"


def test_both_ways_to_scale_have_the_same_thresholds() -> None:
    thresholds = {
        metric["pods"]["metric"]["name"]: _number(metric["pods"]["target"]["averageValue"])
        for item in of(overlay("production"), "HorizontalPodAutoscaler").values()
        for metric in item["spec"]["metrics"]
    }
    for item in yaml.safe_load_all(KEDA.read_text()):
        for trigger in item["spec"]["triggers"]:
            (name,) = _NAME.findall(trigger["metadata"]["query"])
            assert float(trigger["metadata"]["threshold"]) == thresholds[name]


def test_both_ways_to_scale_take_the_same_time() -> None:
    behaviors = {
        name: item["spec"]["behavior"] for name, item in of(overlay("production"), "HorizontalPodAutoscaler").items()
    }
    for item in yaml.safe_load_all(KEDA.read_text()):
        own = item["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert own == behaviors[item["metadata"]["name"]]


def test_the_dashboard_is_current() -> None:
    assert json.loads(dashboard.PATH.read_text()) == dashboard.dashboard(), "`make k8s-config` writes it"


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken
                taken.add((x, y))
    assert max(x for x, _ in taken) == 23


def _number(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
