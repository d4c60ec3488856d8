"""The component `inference-pool`: what the endpoint picker is told of orchestrators is so."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.serving.affinity import SESSION
from tests.k8s.rendering import K8S, Manifest, container, labels, matches, of, with_components, workloads
from tests.k8s.test_monitoring import names, orchestrator_registry

ENGINE_TYPE = "llm-d.ai/engine-type"
SPECS = ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")


@pytest.fixture(scope="module")
def objects() -> Iterator[list[Manifest]]:
    folder = Path(tempfile.mkdtemp(dir=K8S, prefix=".test-"))
    try:
        yield with_components(folder, "inference-pool")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def config(objects: list[Manifest]) -> dict[str, Any]:
    (text,) = of(objects, "ConfigMap")["outrider-endpoint-picker"]["data"].values()
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def parameters(config: dict[str, Any], plugin: str) -> dict[str, Any]:
    (found,) = [item for item in config["plugins"] if item["type"] == plugin]
    given: dict[str, Any] = found["parameters"]
    return given


def test_the_pool_has_the_orchestrators_at_their_http_port(objects: list[Manifest]) -> None:
    (pool,) = of(objects, "InferencePool").values()
    chosen = [name for name, item in workloads(objects).items() if matches(pool["spec"]["selector"], labels(item))]
    assert chosen == ["orchestrator"]
    ports = {port["name"]: port["containerPort"] for port in container(workloads(objects)["orchestrator"])["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]


def test_the_label_of_the_pods_names_the_engine(objects: list[Manifest], config: dict[str, Any]) -> None:
    given = parameters(config, "core-metrics-extractor")
    assert given["engineLabelKey"] == ENGINE_TYPE
    engine = labels(workloads(objects)["orchestrator"])[ENGINE_TYPE]
    assert [item["name"] for item in given["engineConfigs"]] == [engine] == [given["defaultEngine"]]
    for service in ("target", "draft"):
        assert ENGINE_TYPE not in labels(workloads(objects)[service])


async def test_orchestrators_expose_the_metrics(config: dict[str, Any]) -> None:
    (engine,) = parameters(config, "core-metrics-extractor")["engineConfigs"]
    registry = await orchestrator_registry()
    gauges = {family.name for family in registry.collect() if family.type == "gauge"}
    for spec in SPECS:
        assert engine[spec] in names(registry), spec
        assert engine[spec] in gauges, "the picker takes the current number"
    assert set(engine) == {"name", *SPECS}, "there are no LoRA adapters, and no blocks of its own"


def test_sessions_come_back_by_our_header(config: dict[str, Any]) -> None:
    given = parameters(config, "session-affinity-scorer")
    assert given == {"algorithm": "session_id_header", "headerName": SESSION}


def test_every_plugin_that_is_scheduled_is_there(config: dict[str, Any]) -> None:
    known = {item["type"] for item in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    scheduled = [item["pluginRef"] for item in profile["plugins"]]
    assert set(scheduled) == known - {"metrics-data-source", "core-metrics-extractor"}
    assert all(item.get("weight", 1) > 0 for item in profile["plugins"])
