"""The manifests are valid, and fit each other and the services' settings."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from pydantic_settings import BaseSettings

from k8s import configure
from outrider.cli.main import main
from outrider.discovery.endpoints import DnsPlace, parse_place
from outrider.serving.settings import PREFIX
from tests.k8s.rendering import (
    ALTERNATIVES,
    COMPONENT,
    COMPONENTS,
    K8S,
    OVERLAYS,
    SERVICES,
    Manifest,
    all_together,
    container,
    containers,
    environment,
    kustomize,
    labels,
    matches,
    of,
    overlay,
    pod,
    pod_makers,
    with_components,
    workloads,
)

SCHEMAS = "1.37"
CUSTOM = {
    "BackendTLSPolicy",
    "Certificate",
    "GRPCRoute",
    "HTTPRoute",
    "InferencePool",
    "Issuer",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
}
"""Kinds that operators bring along; their schemas are not Kubernetes' own, and `make k8s-check` has them."""
GIVEN = {
    "outrider-hub",
    "outrider-redis",
    "outrider-registry",
    "outrider-tenants",
    *(f"outrider-{service}-tls" for service in SERVICES),
}
"""Secrets that whoever deploys makes; the overlays and components say so."""
GIVEN_MAPS = {"outrider-authority", "outrider-redis-authority"}
"""ConfigMaps likewise."""
FROM_ELSEWHERE = {"redis_url": "redis://redis:6379/0", "kv_blocks_url": "redis://redis:6379/0", "replica": "pod-0"}

every_overlay = pytest.mark.parametrize("name", OVERLAYS)


def validate(objects: list[Manifest]) -> None:
    assert objects
    for item in objects:
        if item["kind"] not in CUSTOM:
            validate_text(json.dumps(item))


@functools.cache
def validate_text(text: str) -> None:
    """Asserts that an object is valid; most objects are in many renderings, and each takes a schema to be read."""
    kubernetes_validate.validate(json.loads(text), SCHEMAS, strict=True)


@every_overlay
def test_every_object_is_valid(name: str) -> None:
    validate(overlay(name))


def test_a_vllm_server_and_its_drafts_are_all_there_is() -> None:
    objects = kustomize(K8S / "vllm-drafts")
    validate(objects)
    assert set(workloads(objects)) == {"vllm", "draft"}
    assert set(of(objects, "Service")) == {"vllm", "draft"}
    variables = {item["name"]: item.get("value") for item in container(workloads(objects)["vllm"])["env"]}
    place = parse_place(variables["OUTRIDER_DRAFTS"], "drafts")
    assert isinstance(place, DnsPlace)
    draft = of(objects, "Service")["draft"]
    assert place.host == "draft" and place.port in {port["port"] for port in draft["spec"]["ports"]}


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_goes_with_the_base_alone(component: str, scratch: Path) -> None:
    objects = with_components(scratch, component)
    validate(objects)
    check_references(objects)


@pytest.mark.parametrize("alternative", ALTERNATIVES)
def test_all_components_go_together(alternative: str) -> None:
    objects = all_together(alternative)
    validate(objects)
    check_references(objects)
    check_restricted(objects)
    assert not of(objects, "HorizontalPodAutoscaler"), "KEDA scales in their place"


@every_overlay
def test_selectors_match(name: str) -> None:
    objects = overlay(name)
    pods = [labels(workload) for workload in pod_makers(objects).values()]
    for workload in workloads(objects).values():
        assert matches(workload["spec"]["selector"], labels(workload))
        assert sum(matches(workload["spec"]["selector"], found) for found in pods) == 1
    for service in of(objects, "Service").values():
        assert sum(matches({"matchLabels": service["spec"]["selector"]}, found) for found in pods) == 1
        speaks_http = [port["name"] for port in service["spec"]["ports"]] == ["http"]
        is_headless = service["spec"].get("clusterIP") == "None"
        assert is_headless != speaks_http, "an HTTP/2 connection through a ClusterIP stays with one pod"
    for budget in of(objects, "PodDisruptionBudget").values():
        assert sum(matches(budget["spec"]["selector"], found) for found in pods) == 1
    for policy in of(objects, "NetworkPolicy").values():
        spec = policy["spec"]
        # The Redis pods of the component `redis` are elsewhere in production.
        if any(matches(spec["podSelector"], found) for found in pods):
            continue
        assert "redis" in policy["metadata"]["name"]


@every_overlay
def test_every_service_has_all_that_it_needs(name: str) -> None:
    objects = overlay(name)
    scalers = of(objects, "HorizontalPodAutoscaler")
    assert set(SERVICES) <= set(of(objects, "Deployment"))
    for service in SERVICES:
        for kind in ("Service", "ServiceAccount", "PodDisruptionBudget"):
            assert service in of(objects, kind)
        assert scalers[service]["spec"]["scaleTargetRef"]["name"] == service
        assert "replicas" not in of(objects, "Deployment")[service]["spec"], "the autoscaler decides"


@every_overlay
def test_ports_are_those_of_the_settings(name: str) -> None:
    objects = overlay(name)
    for service in SERVICES:
        workload = workloads(objects)[service]
        known = environment(objects, workload)
        ports = {item["name"]: item["containerPort"] for item in container(workload)["ports"]}
        assert known["OUTRIDER_ADDRESS"].endswith(f":{ports['grpc']}")
        assert known["OUTRIDER_METRICS_ADDRESS"].endswith(f":{ports['metrics']}")
        if service == "orchestrator":
            assert known["OUTRIDER_HTTP_ADDRESS"].endswith(f":{ports['http']}")
        for port in of(objects, "Service")[service]["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        check_probes(service, container(workload), ports.get("health", ports["grpc"]))


@every_overlay
def test_attack_17_reflection_is_off_in_every_overlay(name: str) -> None:
    objects = overlay(name)
    for service in SERVICES:
        assert environment(objects, workloads(objects)[service]).get("OUTRIDER_REFLECTION", "false") == "false"


def check_probes(service: str, found: Manifest, port: int) -> None:
    """Asserts that all three probes ask the right thing at a port that answers without a certificate."""
    # A worker has started once its model is loaded; a restart of an orchestrator brings no Redis.
    started = "liveness" if service == "orchestrator" else "readiness"
    for probe, asked in (("startupProbe", started), ("readinessProbe", "readiness"), ("livenessProbe", "liveness")):
        if "httpGet" in found[probe]:
            # The orchestrator's second API, which answers as gRPC's `readiness` does.
            assert (service, probe) == ("orchestrator", "readinessProbe")
            assert found[probe]["httpGet"] == {"path": "/health", "port": "http"}
            continue
        assert found[probe]["grpc"] == {"port": port, "service": asked}
    assert found["startupProbe"]["failureThreshold"] * found["startupProbe"]["periodSeconds"] >= 120


def test_probes_go_to_the_plain_port_where_there_is_tls(scratch: Path) -> None:
    objects = with_components(scratch, "tls")
    for service in SERVICES:
        workload = workloads(objects)[service]
        known = environment(objects, workload)
        ports = {item["name"]: item["containerPort"] for item in container(workload)["ports"]}
        assert known["OUTRIDER_HEALTH_ADDRESS"].endswith(f":{ports['health']}")
        check_probes(service, container(workload), ports["health"])
        assert "httpGet" not in container(workload)["readinessProbe"]
        check_settings(service, known)


@every_overlay
def test_the_environment_is_what_the_settings_take(name: str) -> None:
    objects = overlay(name)
    for service in SERVICES:
        workload = workloads(objects)[service]
        check_settings(service, environment(objects, workload))
        for item in container(workload)["env"]:
            name = item["name"].removeprefix(PREFIX)
            assert name == item["name"] or name.lower() in configure.KINDS[service].model_fields


def check_settings(service: str, known: Mapping[str, str]) -> BaseSettings:
    """Asserts that each variable is a setting, and its value right; returns the settings."""
    kind = configure.KINDS[service]
    given = {name.removeprefix(PREFIX).lower(): value for name, value in known.items() if name.startswith(PREFIX)}
    assert set(given) <= set(kind.model_fields), "not a setting"
    elsewhere = {field: value for field, value in FROM_ELSEWHERE.items() if field in kind.model_fields}
    return kind(**{**elsewhere, **given})  # type: ignore[arg-type]


@every_overlay
def test_there_is_time_to_drain(name: str) -> None:
    objects = overlay(name)
    for service in SERVICES:
        workload = workloads(objects)[service]
        settings: Any = check_settings(service, environment(objects, workload))
        pause_s = container(workload)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace_s = pod(workload)["terminationGracePeriodSeconds"]
        assert pause_s + settings.drain_budget_s + 5 <= grace_s


@every_overlay
def test_nothing_refers_to_what_is_not_there(name: str) -> None:
    check_references(overlay(name))


def check_references(objects: list[Manifest]) -> None:
    """Asserts that ConfigMaps, Secrets, accounts, roles and volumes that are named exist, or are whoever deploys's."""
    secrets, maps, accounts = set(of(objects, "Secret")), of(objects, "ConfigMap"), of(objects, "ServiceAccount")
    given = GIVEN | secrets
    read = set()
    for workload in pod_makers(objects).values():
        spec, mounted = pod(workload), set()
        assert spec["serviceAccountName"] in accounts
        for item in spec.get("imagePullSecrets", ()):
            assert item["name"] in given
        for one in containers(workload):
            for item in one.get("envFrom", ()):
                assert item["configMapRef"]["name"] in maps
            for item in one.get("env", ()):
                source = item.get("valueFrom", {})
                if reference := source.get("secretKeyRef"):
                    is_generated = any(name.startswith(f"{reference['name']}-") for name in secrets)
                    assert reference["name"] in (secrets if is_generated else given), "the suffix is lost"
                    read.add(reference["key"])
                if reference := source.get("configMapKeyRef"):
                    assert reference["name"] in maps
                    assert reference.get("optional") or reference["key"] in maps[reference["name"]]["data"]
            mounted |= {mount["name"] for mount in one["volumeMounts"]}
        volumes = {item["name"]: item for item in spec.get("volumes", ())}
        for claim in workload["spec"].get("volumeClaimTemplates", ()):
            volumes[claim["metadata"]["name"]] = claim
        assert mounted == set(volumes)
        for volume in volumes.values():
            assert len(volume) == 2 or "volumeClaimTemplates" in workload["spec"], "of one kind"
            if "secret" in volume:
                assert volume["secret"]["secretName"] in given
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps.keys() | GIVEN_MAPS
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in of(objects, "PersistentVolumeClaim")
        if name := spec.get("priorityClassName"):
            assert name in of(objects, "PriorityClass")
    # Targets on vLLM keep no KV blocks in Redis.
    keeps_blocks = environment(objects, workloads(objects)["target"]).get("OUTRIDER_ENGINE") != "vllm"
    assert {"sessions-url", "token", *(("kv-blocks-url",) if keeps_blocks else ())} <= read
    namespaces = set(of(objects, "Namespace"))
    for binding in of(objects, "RoleBinding").values():
        assert all({subject.get("namespace")} == namespaces for subject in binding["subjects"] if namespaces)
        assert binding["roleRef"]["name"] in of(objects, "Role")
        assert all(subject["name"] in accounts for subject in binding["subjects"])
    for scaler in (of(objects, "HorizontalPodAutoscaler") | of(objects, "ScaledObject")).values():
        assert scaler["spec"]["scaleTargetRef"]["name"] in workloads(objects)
        kind = scaler["spec"]["scaleTargetRef"]["kind"]
        assert workloads(objects)[scaler["spec"]["scaleTargetRef"]["name"]]["kind"] == kind


@every_overlay
def test_generated_secrets_hold_what_is_asked_of_them(name: str) -> None:
    objects = overlay(name)
    for workload in workloads(objects).values():
        for item in container(workload).get("env", ()):
            reference = item.get("valueFrom", {}).get("secretKeyRef")
            if reference and (secret := of(objects, "Secret").get(reference["name"])):
                assert reference["key"] in secret["data"]


@every_overlay
def test_pods_are_restricted_and_bounded(name: str) -> None:
    check_restricted(overlay(name))


def check_restricted(objects: list[Manifest]) -> None:
    """Asserts that pods are what the restricted profile allows, within bounds, and have the rights that they need."""
    for workload in pod_makers(objects).values():
        spec = pod(workload)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in containers(workload):
            security = one["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            for bound in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(one["resources"][bound])
        for volume in spec.get("volumes", ()):
            assert "hostPath" not in volume, "the restricted profile refuses it"
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]
        wants_token = spec.get("automountServiceAccountToken", True)
        assert wants_token == (workload["metadata"]["name"] == "orchestrator")


@every_overlay
def test_what_is_written_is_on_a_volume(name: str) -> None:
    objects = overlay(name)
    for service in ("draft", "target"):
        workload = workloads(objects)[service]
        mounts = {mount["mountPath"] for mount in container(workload)["volumeMounts"]}
        known = environment(objects, workload)
        assert {known["HOME"], known["HF_HOME"], known["XDG_CACHE_HOME"], "/tmp"} <= mounts


def nodes(spec: Manifest) -> list[Manifest]:
    """Returns the terms, of which a node must fulfil one."""
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return required["nodeSelectorTerms"]


def test_production_keeps_drafts_off_targets_nodes() -> None:
    found = workloads(overlay("production"))
    draft, target = pod(found["draft"]), pod(found["target"])
    assert nodes(draft) != nodes(target)
    (rule,) = draft["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert matches(rule["labelSelector"], labels(found["target"]))
    for service in ("draft", "target"):
        for bound in ("requests", "limits"):
            assert container(found[service])["resources"][bound]["nvidia.com/gpu"] == "1"
        assert pod(found[service])["tolerations"]
    assert "nvidia.com/gpu" not in container(found["orchestrator"])["resources"]["limits"]


@every_overlay
def test_the_network_is_closed_but_for_what_is_needed(name: str) -> None:
    policies = of(overlay(name), "NetworkPolicy")
    assert policies["deny-all"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (_, scrape) = policies["workers"]["spec"]["ingress"]
    (calls,) = [rule for rule in policies["workers"]["spec"]["ingress"] if rule is not scrape]
    (caller,) = calls["from"]
    assert matches(caller["podSelector"], {COMPONENT: "orchestrator"})
    assert ("managed-redis-sessions" in policies) == (name == "production"), "where Redis is not in the namespace"
    reached = [
        peer["podSelector"] for rule in policies["orchestrator"]["spec"]["egress"] for peer in rule.get("to", ())
    ]
    for component in ("draft", "target", "redis-sessions"):
        assert any(matches(selector, {COMPONENT: component}) for selector in reached)
    assert not any(matches(selector, {COMPONENT: "redis-kv-blocks"}) for selector in reached)


@every_overlay
def test_the_orchestrator_may_read_endpoints_and_nothing_else(name: str) -> None:
    (rule,) = of(overlay(name), "Role")["orchestrator"]["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }


def test_workers_are_found_by_the_names_of_their_services_and_ports() -> None:
    objects = overlay("local")
    known = environment(objects, workloads(objects)["orchestrator"])
    for setting, service in (("OUTRIDER_TARGETS", "target"), ("OUTRIDER_DRAFTS", "draft")):
        name, port = known[setting].removeprefix("kubernetes:///").split(":")
        ports = of(objects, "Service")[name]["spec"]["ports"]
        assert (name, [item["name"] for item in ports]) == (service, [port])


def test_a_plan_becomes_replicas(scratch: Path) -> None:
    numbers = "--sessions 500 --rate 20 --pass-s 0.02 --draft-step-s 0.002 --acceptance 0.8 --hit-rate 0.7 --json"
    done = CliRunner().invoke(main, ["plan", *numbers.split(), "--patch", str(scratch / "plan")])
    assert done.exit_code == 0, done.output
    (chosen,) = [fleet for fleet in json.loads(done.output)["fleets"] if fleet["kind"] == "separate"]
    (scratch / "whole").mkdir()
    whole = {"resources": ["../../overlays/production"], "components": ["../plan"]}
    (scratch / "whole" / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    scalers = of(kustomize(scratch / "whole"), "HorizontalPodAutoscaler")
    for service in SERVICES:
        num = chosen[f"num_{service}s"]
        assert num > 0
        assert scalers[service]["spec"]["minReplicas"] == num
        assert scalers[service]["spec"]["maxReplicas"] == 2 * num


def test_generated_files_are_current() -> None:
    for service in configure.KINDS:
        path = configure.FOLDER / f"{service}.env"
        assert path.read_text() == configure.env_file(service), "`make k8s-config` writes them"


def test_no_image_floats_in_production() -> None:
    for workload in workloads(overlay("production")).values():
        image = container(workload)["image"]
        assert re.search(r":\d+\.\d+\.\d+$", image), image
