"""What components change: values of the cluster reach their places, and what is added fits what is there."""

import functools
import re
import stat
import subprocess
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.v1 import generation_pb2
from tests.k8s.rendering import (
    ALTERNATIVES,
    COMPONENTS,
    K8S,
    LOADER,
    OVERLAYS,
    SERVICES,
    Manifest,
    container,
    containers,
    environment,
    labels,
    matches,
    of,
    overlay,
    pod,
    pod_makers,
    production,
    strings,
    values,
    workloads,
)
from tests.k8s.test_manifests import check_probes, check_references, check_restricted, check_settings, validate

DOCS = K8S.parent / "docs" / "operations.md"
BASE_VALUES = K8S / "base" / "cluster.env"
PRODUCTION_VALUES = K8S / "overlays" / "production" / "cluster" / "cluster.env"
# Of a kind that the field takes, and each unlike all others.
MARKERS = {
    "target-gpus": "7",
    "models-size": "1234Gi",
    "sessions-redis-cidr": "10.11.12.13/32",
    "sessions-redis-port": "6391",
    "kv-blocks-redis-cidr": "10.11.12.14/32",
    "kv-blocks-redis-port": "6392",
    "models-folder": "/srv/marked",
}
ADDED = ("gateway", "ingress", "keda", "monitoring", "multi-gpu", "redis", "storage-class", "tracing", "vllm")


@functools.cache
def keys_of(component: str) -> frozenset[str]:
    """Returns the values of the cluster that a component reads."""
    found = yaml.load((K8S / "components" / component / "kustomization.yaml").read_text(), LOADER)
    read = [item["source"] for item in found.get("replacements", ())]
    assert all(source["name"] == "cluster" for source in read)
    return frozenset(source["fieldPath"].removeprefix("data.") for source in read)


# Values of the cluster.


def test_values_of_the_cluster_are_named_once_and_read() -> None:
    known = values(BASE_VALUES)
    assert {key for name in COMPONENTS for key in keys_of(name)} == set(known)
    assert set(values(PRODUCTION_VALUES)) <= set(known)


def test_each_value_says_which_components_read_it() -> None:
    explained = ""
    for line in BASE_VALUES.read_text().splitlines():
        if line.startswith("#"):
            explained = line if not explained.startswith("#") else f"{explained} {line[2:]}"
        elif line:
            named = re.findall(r"\(components? ([a-z-, ]+)\)", explained)
            readers = {name for text in named for name in re.split(r", | and ", text)}
            key = line.partition("=")[0]
            missing = {name for name in COMPONENTS if key in keys_of(name)} - readers
            assert missing <= {"models-on-nodes"}, (key, missing)
        else:
            explained = ""


@pytest.mark.parametrize("alternative", ALTERNATIVES)
def test_each_value_reaches_its_places(alternative: str, scratch: Path) -> None:
    marked = {key: MARKERS.get(key, f"marked-{key}") for key in values(BASE_VALUES)}
    objects = production(scratch, alternative, *ADDED, without=ALTERNATIVES, cluster=marked)
    numbers = {str(port["port"]) for item in of(objects, "NetworkPolicy").values() for port in ports(item)}
    found = numbers.union(strings(objects))
    for name in COMPONENTS:
        if name == alternative or name not in ALTERNATIVES:
            assert {marked[key] for key in keys_of(name)} <= found


def ports(policy: Manifest) -> list[Manifest]:
    """Returns the ports of a policy."""
    spec = policy["spec"]
    rules = [*spec.get("ingress", ()), *spec.get("egress", ())]
    return [port for rule in rules for port in rule.get("ports", ())]


def test_nothing_is_left_of_a_value_that_was_changed(scratch: Path) -> None:
    usual = values(BASE_VALUES)
    objects = production(scratch, *ADDED, cluster={"target-node-label": "gpu.example/large", "draft-node-value": "no"})
    assert usual["target-node-label"] not in set(strings(objects))
    spec = pod(workloads(objects)["target"])["affinity"]["nodeAffinity"]
    (term,) = spec["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "gpu.example/large", "operator": "In", "values": ["true"]}]


def test_the_values_are_applied_nowhere() -> None:
    for name in OVERLAYS:
        assert not [item for item in of(overlay(name), "ConfigMap") if item.startswith("cluster")]


# Namespaces.


@pytest.mark.parametrize("namespace", ["outrider", "elsewhere"])
def test_all_goes_by_the_namespace_of_the_overlay(namespace: str, scratch: Path) -> None:
    objects = production(scratch, *ADDED, namespace=namespace)
    assert not [text for text in strings(objects) if "NAMESPACE" in text]
    queries = [
        trigger["metadata"]["query"]
        for item in of(objects, "ScaledObject").values()
        for trigger in item["spec"]["triggers"]
    ]
    assert len(queries) == 6
    assert all(f'{{namespace="{namespace}"}}' in query for query in queries)
    (group,) = of(objects, "PrometheusRule")["outrider"]["spec"]["groups"]
    (absent,) = [rule["expr"] for rule in group["rules"] if "absent" in rule["expr"]]
    assert f'namespace="{namespace}"' in absent
    names = of(objects, "Certificate")["orchestrator"]["spec"]["dnsNames"]
    assert {f"orchestrator.{namespace}.svc", f"orchestrator-http.{namespace}.svc.cluster.local"} <= set(names)
    assert len(names) == len(set(names))
    cluster_wide = {"Namespace", "PersistentVolume", "PriorityClass"}
    for item in objects:
        assert item["kind"] in cluster_wide or item["metadata"]["namespace"] == namespace, item["metadata"]["name"]


# The production overlay.


def test_services_speak_tls_and_certificates_have_their_names() -> None:
    objects = overlay("production")
    known = environment(objects, workloads(objects)["orchestrator"])
    made = {item["spec"]["secretName"]: item["spec"] for item in of(objects, "Certificate").values()}
    issuers = of(objects, "Issuer")
    for service in SERVICES:
        workload = workloads(objects)[service]
        settings: Any = check_settings(service, environment(objects, workload))
        assert settings.tls.certificate is not None
        assert (settings.tls.authority is not None) == (service != "orchestrator"), "clients need no certificate"
        (volume,) = [item["secret"] for item in pod(workload)["volumes"] if item["name"] == "tls"]
        spec = made[volume["secretName"]]
        (folder,) = {mount["mountPath"] for mount in container(workload)["volumeMounts"] if mount["name"] == "tls"}
        assert settings.tls.certificate.parent == Path(folder)
        assert {"server auth", "client auth"} <= set(spec["usages"])
        authority = issuers[spec["issuerRef"]["name"]]["spec"]["ca"]["secretName"]
        assert made[authority]["isCA"]
        assert "selfSigned" in issuers[made[authority]["issuerRef"]["name"]]["spec"]
        health = {item["name"]: item["containerPort"] for item in container(workload)["ports"]}["health"]
        assert settings.health_address.endswith(f":{health}")
        check_probes(service, container(workload), health)
        for name in (service, "orchestrator-http") if service == "orchestrator" else (service,):
            assert name in spec["dnsNames"]
            (port,) = of(objects, "Service")[name]["spec"]["ports"]
            assert port["appProtocol"] == "https"
    orchestrator: Any = check_settings("orchestrator", known)
    assert orchestrator.worker_tls is not None
    for place, worker in ((orchestrator.targets[0], "target"), (orchestrator.drafts[0], "draft")):
        assert f"///{worker}:" in place, "the name that a worker's certificate must have"


def test_callers_need_a_token() -> None:
    objects = overlay("production")
    workload = workloads(objects)["orchestrator"]
    file = Path(environment(objects, workload)["OUTRIDER_TENANTS_FILE"])
    (mount,) = [item for item in container(workload)["volumeMounts"] if item["mountPath"] == str(file.parent)]
    (volume,) = [item for item in pod(workload)["volumes"] if item["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "outrider-tenants"


def test_redis_is_reached_at_its_address_only(scratch: Path) -> None:
    """As shipped the addresses are of a range that is reserved for documentation: nothing is reached by accident."""
    for changed in ({}, {"sessions-redis-cidr": "10.0.0.5/32", "sessions-redis-port": "6380"}):
        objects = production(scratch, cluster=changed)
        known = values(PRODUCTION_VALUES) | changed
        for redis, service in (("sessions", "orchestrator"), ("kv-blocks", "target")):
            spec = of(objects, "NetworkPolicy")[f"managed-redis-{redis}"]["spec"]
            for other, workload in workloads(objects).items():
                assert matches(spec["podSelector"], labels(workload)) == (other == service)
            (rule,) = spec["egress"]
            (peer,) = rule["to"]
            assert peer["ipBlock"] == {"cidr": known[f"{redis}-redis-cidr"]}
            assert rule["ports"] == [{"port": int(known[f"{redis}-redis-port"])}], "a number, not a port's name"
            if not changed:
                assert ip_network(peer["ipBlock"]["cidr"]).subnet_of(ip_network("192.0.2.0/24"))
        blocks = [text for text in strings(list(of(objects, "NetworkPolicy").values())) if text.endswith("/0")]
        assert not blocks


def test_one_pod_may_go(scratch: Path) -> None:
    for objects in (overlay("production"), production(scratch, "keda")):
        scaled = of(objects, "HorizontalPodAutoscaler") | of(objects, "ScaledObject")
        for service in ("orchestrator", "target"):
            spec = scaled[service]["spec"]
            least = spec.get("minReplicas", spec.get("minReplicaCount"))
            assert least - of(objects, "PodDisruptionBudget")[service]["spec"]["maxUnavailable"] >= 1


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_rollout_starts_a_pod_before_it_ends_one(name: str) -> None:
    for service in ("orchestrator", "target"):
        rolling = workloads(overlay(name))[service]["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_spread_over_zones_and_nodes(name: str) -> None:
    for service in SERVICES:
        workload = workloads(overlay(name))[service]
        rules = pod(workload)["topologySpreadConstraints"]
        assert [rule["topologyKey"] for rule in rules] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        assert all(matches(rule["labelSelector"], labels(workload)) for rule in rules)


def test_drafts_give_way_to_targets_and_these_to_orchestrators() -> None:
    objects = overlay("production")
    classes = of(objects, "PriorityClass")
    found = {service: classes[pod(workloads(objects)[service])["priorityClassName"]]["value"] for service in SERVICES}
    assert 0 < found["draft"] < found["target"] < found["orchestrator"] < 1_000_000_000


def test_every_image_is_pulled_with_the_password(scratch: Path) -> None:
    for objects in (overlay("production"), production(scratch, "models-on-nodes", "redis", without=ALTERNATIVES)):
        for workload in pod_makers(objects).values():
            assert pod(workload)["imagePullSecrets"] == [{"name": "outrider-registry"}]


@pytest.mark.parametrize("left_out", ["multi-gpu", "vllm"])
def test_what_may_be_added_to_production_fits_it(left_out: str, scratch: Path) -> None:
    objects = production(scratch, *(name for name in ADDED if name != left_out))
    validate(objects)
    check_references(objects)
    check_restricted(objects)


# Models.


@pytest.mark.parametrize("component", ALTERNATIVES)
def test_only_the_download_reaches_the_hub(component: str, scratch: Path) -> None:
    objects = production(scratch, component, without=ALTERNATIVES)
    validate(objects)
    check_references(objects)
    check_restricted(objects)
    makers = pod_makers(objects)
    claim = of(objects, "PersistentVolumeClaim")["models"]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    for name, workload in makers.items():
        has_token = any(
            item.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == "outrider-hub"
            for one in containers(workload)
            for item in one.get("env", ())
        )
        open_to_all = [
            rule
            for policy in of(objects, "NetworkPolicy").values()
            if matches(policy["spec"]["podSelector"], labels(workload))
            for rule in policy["spec"].get("egress", ())
            if "to" not in rule and {443} & {port["port"] for port in rule["ports"]}
        ]
        assert has_token == (name == "models")
        # The orchestrator's is for the API server.
        assert bool(open_to_all) == (name in ("models", "orchestrator"))
    for service in ("target", "draft"):
        assert environment(objects, makers[service])["HF_HUB_OFFLINE"] == "1"
        (volume,) = [item for item in pod(makers[service])["volumes"] if item["name"] == "models"]
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        for one in containers(makers[service]):
            (mount,) = [item for item in one["volumeMounts"] if item["name"] == "models"]
            assert mount["readOnly"]
            assert {item["name"]: item.get("value") for item in one["env"]}["HF_HOME"] == mount["mountPath"]
        (waiting, serving) = containers(makers[service])
        assert waiting["image"] == serving["image"]
    (download,) = containers(makers["models"])
    assert download["image"] == container(makers["target"])["image"]
    assert (
        pod(makers["models"])["securityContext"]["runAsUser"] == pod(makers["target"])["securityContext"]["runAsUser"]
    )


def test_a_folder_of_the_nodes_is_a_volume_that_its_claim_takes(scratch: Path) -> None:
    objects = production(scratch, "models-on-nodes", without=ALTERNATIVES)
    claim, volume = of(objects, "PersistentVolumeClaim")["models"], of(objects, "PersistentVolume")["outrider-models"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == "", "or a class makes another one"
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"]
    assert claim["spec"]["resources"]["requests"]["storage"] == volume["spec"]["capacity"]["storage"]
    assert "nodeAffinity" not in volume["spec"], "each node has its own folder"
    filled = node_terms(of(objects, "DaemonSet")["models"])
    for service in ("target", "draft"):
        (term,) = node_terms(workloads(objects)[service])
        assert term in filled
        tolerated = pod(of(objects, "DaemonSet")["models"])["tolerations"]
        assert all(item in tolerated for item in pod(workloads(objects)[service])["tolerations"])


def node_terms(workload: Manifest) -> list[Manifest]:
    """Returns the terms, of which a node must fulfil one."""
    spec = pod(workload)["affinity"]["nodeAffinity"]
    return spec["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]


def test_workers_wait_until_their_model_is_downloaded(tmp_path: Path) -> None:
    """The scripts run as they are, with a stand-in for `hf`."""
    objects = overlay("production")
    (tmp_path / "hf").write_text('#!/bin/sh\necho "$@" >> "$HF_HOME/calls"\ntest ! -e "$HF_HOME/refuses"\n')
    (tmp_path / "hf").chmod(stat.S_IRWXU)
    home = tmp_path / "home"
    home.mkdir()
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_HOME": str(home)}
    (download,) = containers(of(objects, "Job")["models"])
    waiting = containers(workloads(objects)["target"])[0]
    download_variables = variables | {"TARGET_MODEL": "acme/large", "DRAFT_MODEL": "acme/small"}

    def run(one: Manifest, known: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*one["command"], *one["args"]], env=known, stdout=subprocess.PIPE)

    waiter = run(waiting, variables | {"OUTRIDER_MODEL": "acme/large"})
    assert waiter.stdout is not None
    with waiter.stdout:
        assert b"acme/large is not downloaded yet" in waiter.stdout.readline()
        (home / "refuses").touch()
        with run(download, download_variables) as refused:
            assert refused.wait(10) != 0
        assert waiter.poll() is None
    waiter.kill()
    waiter.wait(10)
    (home / "refuses").unlink()
    with run(download, download_variables) as done:
        assert done.wait(10) == 0
    calls = (home / "calls").read_text().splitlines()
    assert [call.split()[:2] for call in calls[1:]] == [["download", "acme/large"], ["download", "acme/small"]]
    for known in ({"OUTRIDER_MODEL": "acme/large"}, {"OUTRIDER_MODEL": "acme/small"}, {}):
        with run(waiting, variables | known) as ready:
            assert ready.wait(10) == 0


# Several GPUs.


def test_a_target_has_a_process_for_each_gpu(scratch: Path) -> None:
    objects = production(scratch, "multi-gpu", cluster={"target-gpus": "4"})
    workload = workloads(objects)["target"]
    one = container(workload)
    own = {item["name"]: item["value"] for item in one["env"] if "value" in item}
    for bound in ("requests", "limits"):
        assert one["resources"][bound]["nvidia.com/gpu"] == own["TARGET_GPUS"] == "4"
    command = [own["TARGET_GPUS"] if text == "$(TARGET_GPUS)" else text for text in one["command"]]
    assert command == [
        "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "target_service",
    ]
    budget_s = float(environment(objects, workload)["OUTRIDER_DRAIN_BUDGET_S"])
    pause_s = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    killed_s = float(own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert budget_s < killed_s < pod(workload)["terminationGracePeriodSeconds"] - pause_s


# Clients outside the cluster.


def test_routes_lead_to_the_orchestrators_ports(scratch: Path) -> None:
    objects = production(scratch, "gateway", "ingress")
    services = of(objects, "Service")
    names = set(of(objects, "Certificate")["orchestrator"]["spec"]["dnsNames"])
    hosts = []
    for kind in ("GRPCRoute", "HTTPRoute"):
        (route,) = of(objects, kind).values()
        hosts += route["spec"]["hostnames"]
        assert set(route["spec"]["hostnames"]) <= names
        (rule,) = route["spec"]["rules"]
        for behind in rule["backendRefs"]:
            (port,) = services[behind["name"]]["spec"]["ports"]
            assert port["port"] == behind["port"]
            assert (port["name"] == "grpc") == (kind == "GRPCRoute")
    assert len(hosts) == len(set(hosts)), "a listener takes a name for one kind of route only"
    asked = {
        match["method"]["service"]
        for rule in of(objects, "GRPCRoute")["orchestrator"]["spec"]["rules"]
        for match in rule["matches"]
    }
    assert asked == {"grpc.health.v1.Health", generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name}
    (policy,) = of(objects, "BackendTLSPolicy").values()
    assert {item["name"] for item in policy["spec"]["targetRefs"]} == {"orchestrator", "orchestrator-http"}
    assert policy["spec"]["validation"]["hostname"] in names
    for ingress in of(objects, "Ingress").values():
        (entry,) = ingress["spec"]["rules"]
        (secured,) = ingress["spec"]["tls"]
        assert secured["hosts"] == [entry["host"]]
        assert entry["host"] in names
        (path,) = entry["http"]["paths"]
        behind = path["backend"]["service"]
        (port,) = services[behind["name"]]["spec"]["ports"]
        assert behind["port"] == {"name": port["name"]}
        protocol = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"]
        assert protocol == {"grpc": "GRPCS", "http": "HTTPS"}[port["name"]]


# StorageClass.


def test_the_class_of_a_claim_is_the_clusters_unless_named(scratch: Path) -> None:
    (claim,) = workloads(overlay("local"))["redis-sessions"]["spec"]["volumeClaimTemplates"]
    assert "storageClassName" not in claim["spec"]
    objects = production(scratch, "redis", "storage-class", cluster={"sessions-storage-class": "fast"})
    (claim,) = workloads(objects)["redis-sessions"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"


# Words.


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_says_what_it_needs(name: str) -> None:
    text = (K8S / "components" / name / "kustomization.yaml").read_text()
    header = text.partition("apiVersion")[0]
    assert header.startswith("# ")
    (row,) = re.findall(rf"^\| `{name}` \| ([PL ]*)\|", DOCS.read_text(), re.MULTILINE)
    chosen = {letter: kustomization["components"] for letter, kustomization in overlays().items()}
    assert set(row.split()) == {letter for letter, paths in chosen.items() if f"../../components/{name}" in paths}


def overlays() -> dict[str, Manifest]:
    """Returns the overlays' kustomizations by their letters in the table of components."""
    folder = K8S / "overlays"
    return {name[0].upper(): yaml.load((folder / name / "kustomization.yaml").read_text(), LOADER) for name in OVERLAYS}
