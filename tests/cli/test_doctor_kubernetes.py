"""`outrider doctor --kubernetes`: each prerequisite of an overlay, where it holds and where it does not."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from outrider.cli.main import main
from outrider.doctor import cluster_reader
from outrider.doctor.overlay import quantity, read_overlay
from outrider.doctor.pod_security import violations
from outrider.errors import InvalidArgument
from tests.cli.api_server import ApiServer, serving
from tests.k8s.rendering import K8S, OVERLAYS

OVERLAY = """
apiVersion: v1
kind: Namespace
metadata: {name: outrider, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: target, namespace: outrider}
data: {OUTRIDER_TENANTS_FILE: /etc/tenants/tenants.json}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: target, namespace: outrider}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: target, namespace: outrider}
spec:
  template:
    metadata: {labels: {app.kubernetes.io/component: target}}
    spec:
      serviceAccountName: target
      priorityClassName: serving
      imagePullSecrets: [{name: pull}]
      nodeSelector: {outrider.dev/target: "true"}
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: kubernetes.io/arch, operator: In, values: [amd64]}
                  - {key: outrider.dev/broken, operator: DoesNotExist}
                  - {key: generation, operator: Gt, values: ["7"]}
      tolerations: [{key: nvidia.com/gpu, operator: Exists}]
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: target
          image: registry.internal:5000/outrider/target:0.1.0
          envFrom: [{configMapRef: {name: target}}]
          env:
            - {name: REDIS, valueFrom: {secretKeyRef: {name: outrider-redis, key: sessions-url}}}
            - {name: HUB, valueFrom: {secretKeyRef: {name: outrider-hub, key: token, optional: true}}}
          resources:
            requests: {cpu: 500m, memory: 4Gi}
            limits: {memory: 8Gi, nvidia.com/gpu: "1"}
          lifecycle: {preStop: {sleep: {seconds: 2}}}
          readinessProbe: {grpc: {port: 50051}}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
          volumeMounts:
            - {name: tenants, mountPath: /etc/tenants}
            - {name: models, mountPath: /models}
      volumes:
        - {name: tenants, secret: {secretName: outrider-tenants}}
        - {name: tls, secret: {secretName: outrider-target-tls}}
        - {name: models, persistentVolumeClaim: {claimName: models}}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: target, namespace: outrider}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: target}
  minReplicas: 2
  maxReplicas: 4
  metrics:
    - type: Pods
      pods:
        metric: {name: outrider_target_queued_tokens}
        target: {type: AverageValue, averageValue: "4"}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: redis, namespace: outrider}
spec:
  template:
    spec:
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: valkey
          image: docker.io/valkey/valkey:8.1
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
  volumeClaimTemplates:
    - metadata: {name: data}
      spec: {accessModes: [ReadWriteOnce]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: scrapes, namespace: outrider}
spec:
  podSelector: {}
  ingress: [{from: [{namespaceSelector: {matchLabels: {outrider.dev/monitoring: "true"}}}]}]
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata: {name: target, namespace: outrider}
spec:
  secretName: outrider-target-tls
  issuerRef: {name: internal, kind: ClusterIssuer}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: outrider, namespace: outrider}
spec:
  parentRefs: [{name: public, namespace: gateways}]
  hostnames: [llm.internal]
"""
CLUSTER = """
apiVersion: v1
kind: Namespace
metadata: {name: outrider, labels: {}}
---
apiVersion: v1
kind: Namespace
metadata: {name: monitoring, labels: {outrider.dev/monitoring: "true"}}
---
apiVersion: v1
kind: Secret
metadata: {name: outrider-redis}
data: {sessions-url: aHVudGVyMg==}
---
apiVersion: v1
kind: Secret
metadata: {name: outrider-hub}
data: {token: aHVudGVyMg==}
---
apiVersion: v1
kind: Secret
metadata: {name: outrider-tenants}
data: {tenants.json: aHVudGVyMg==}
---
apiVersion: v1
kind: Secret
metadata: {name: pull}
data: {.dockerconfigjson: aHVudGVyMg==}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: models}
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: serving}
---
apiVersion: cert-manager.io/v1
kind: ClusterIssuer
metadata: {name: internal}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: standard, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
---
apiVersion: v1
kind: Node
metadata: {name: small, labels: {}}
spec: {}
status: {allocatable: {cpu: "2", memory: 3Gi}, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Node
metadata:
  name: gpu
  labels: {outrider.dev/target: "true", kubernetes.io/arch: amd64, generation: "9"}
spec: {taints: [{key: nvidia.com/gpu, value: present, effect: NoSchedule}]}
status:
  allocatable: {cpu: "8", memory: 65000000Ki, nvidia.com/gpu: "1"}
  conditions: [{type: Ready, status: "True"}]
"""
GATEWAY = """
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: public}
"""
REDIS = "StatefulSet/redis"
TARGET = "Deployment/target"


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ApiServer]:
    """Yields a cluster that has all that the overlay of these tests needs, as KUBECONFIG names it."""
    cluster = ApiServer()
    cluster.serve(yaml.safe_load_all(OVERLAY))
    cluster.put(CLUSTER)
    cluster.put(GATEWAY, namespace="gateways")
    cluster.metrics = ["pods/outrider_target_queued_tokens"]
    async with serving(cluster):
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        yield cluster


async def doctor(*arguments: str, overlay: str = OVERLAY) -> Result:
    """Runs the command, with the overlay as its input."""
    command = ["doctor", "--kubernetes", *(arguments or ("--overlay", "-"))]
    return await asyncio.to_thread(CliRunner().invoke, main, command, overlay)


async def findings(*arguments: str, overlay: str = OVERLAY) -> list[dict[str, str]]:
    done = await doctor(*(arguments or ("--overlay", "-")), "--json", overlay=overlay)
    assert done.stdout, done.output
    told = json.loads(done.stdout)
    bad = [item for item in told["findings"] if item["state"] in ("fail", "unknown")]
    assert told["ok"] is (not bad) is (done.exit_code == 0)
    found: list[dict[str, str]] = told["findings"]
    return found


async def failing(overlay: str = OVERLAY) -> dict[str, str]:
    """Returns the only finding that does not hold."""
    (found,) = [item for item in await findings(overlay=overlay) if item["state"] != "ok" and not expected(item)]
    return found


def expected(item: dict[str, str]) -> bool:
    """Returns whether a finding is the one that every overlay with a NetworkPolicy has."""
    return item["check"] == "network policies" and "cannot be seen" in item["found"]


async def test_a_cluster_that_has_everything(server: ApiServer) -> None:
    done = await doctor()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == len(await findings())
    assert {line.split()[0] for line in lines} == {"ok", "warn"}
    (warning,) = [line for line in lines if line.startswith("warn")]
    assert "whether the network plug-in enforces them cannot be seen" in warning
    assert any(line.startswith("ok") and "outrider-redis (sessions-url)" in line for line in lines)
    assert any(line.startswith("ok") and "outrider-tenants (tenants.json)" in line for line in lines)
    assert all(method == "GET" or path.endswith("accessreviews") for method, path in server.requests), "it only reads"


async def test_values_of_secrets_are_not_printed(server: ApiServer) -> None:
    server.object("outrider-redis")["data"] = {"other": "aHVudGVyMg=="}
    for output in ((await doctor()).output, (await doctor("--overlay", "-", "--json")).output):
        assert "lacks sessions-url" in output
        assert "hunter2" not in output and "aHVudGVyMg" not in output and "secret-token" not in output


async def test_the_error_is_one_line(server: ApiServer) -> None:
    server.remove("outrider-redis")
    server.refused["/api/v1/nodes"] = 403
    done = await doctor()
    assert done.exit_code == 1
    assert done.stderr == "outrider: error: 1 of 17 prerequisites do not hold, 1 could not be checked\n"


Change = Callable[[ApiServer], Any]


def remove(name: str) -> Change:
    return lambda server: server.remove(name)


def unserve(api_version: str, kind: str) -> Change:
    return lambda server: server.kinds.remove((api_version, kind))


def deny(verb: str, resource: str) -> Change:
    return lambda server: server.denied.add((verb, resource))


def data(name: str, **values: str) -> Change:
    return lambda server: server.object(name).update(data=values)


def relabel(key: str, value: str | None) -> Change:
    """Changes a label of the node with the GPU; None removes it."""

    def change(server: ApiServer) -> None:
        found = server.object("gpu")["metadata"]["labels"]
        found.pop(key, None)
        found.update({} if value is None else {key: value})

    return change


def allocatable(name: str, value: str) -> Change:
    return lambda server: server.object("gpu")["status"]["allocatable"].update({name: value})


def old(server: ApiServer) -> None:
    server.version = {"major": "1", "minor": "29+", "gitVersion": "v1.29.3-eks"}


def tainted(server: ApiServer) -> None:
    server.object("gpu")["spec"]["taints"].append({"key": "maintenance", "effect": "NoExecute"})


def not_ready(server: ApiServer) -> None:
    server.object("gpu")["status"]["conditions"][0]["status"] = "Unknown"


def without_default(server: ApiServer) -> None:
    server.object("standard")["metadata"].pop("annotations")


def without_metrics(server: ApiServer) -> None:
    server.metrics = None


NO_LABELS = f"{TARGET}: none of 2 has the labels"
FAILURES: dict[str, tuple[Change, str, str, str]] = {
    "version": (old, "version", "1.29 is too old for a preStop hook that sleeps", "1.30"),
    "operator": (
        unserve("cert-manager.io/v1", "Certificate"),
        *("kinds", "Certificate of cert-manager.io/v1: not served", "cert-manager"),
    ),
    "gateway api": (
        unserve("gateway.networking.k8s.io/v1", "HTTPRoute"),
        *("kinds", "HTTPRoute of gateway.networking.k8s.io/v1", "Gateway API"),
    ),
    "old api": (
        unserve("autoscaling/v2", "HorizontalPodAutoscaler"),
        *("kinds", "HorizontalPodAutoscaler of autoscaling/v2", "upgrade"),
    ),
    "permission": (deny("create", "deployments"), "permissions", "create deployments.apps", "role"),
    "permission on the namespace": (deny("patch", "namespaces"), "permissions", "may not patch namespaces", "role"),
    "secret": (remove("outrider-redis"), "Secret", "outrider-redis (sessions-url) is missing", "create secret"),
    "secret's key": (data("outrider-redis", url=""), "Secret", "lacks sessions-url", "sessions-url"),
    "secret's file": (data("outrider-tenants", tenants=""), "Secret", "lacks tenants.json", "create"),
    "pull secret": (
        remove("pull"),
        "Secret",
        "pull (.dockerconfigjson) is missing",
        "create secret docker-registry pull",
    ),
    "claim": (remove("models"), "PersistentVolumeClaim", "models is missing", "get persistentvolumeclaims"),
    "priority class": (remove("serving"), "PriorityClass", "serving is missing", "get priorityclasses"),
    "issuer": (remove("internal"), "ClusterIssuer", "internal is missing", "get clusterissuers"),
    "gateway": (remove("public"), "Gateway", "public is missing", "-n gateways"),
    "label": (
        relabel("outrider.dev/target", None),
        *("nodes", NO_LABELS, "kubectl label node NODE outrider.dev/target=true"),
    ),
    "affinity: in": (relabel("kubernetes.io/arch", "arm64"), "nodes", NO_LABELS, "label"),
    "affinity: does not exist": (relabel("outrider.dev/broken", ""), "nodes", NO_LABELS, "label"),
    "affinity: greater": (relabel("generation", "7"), "nodes", NO_LABELS, "label"),
    "taint": (tainted, "nodes", "does not tolerate: maintenance=:NoExecute", "tolerate"),
    "gpu": (allocatable("nvidia.com/gpu", "0"), "nodes", "requests of nvidia.com/gpu", "device plug-in"),
    "memory": (allocatable("memory", "4000M"), "nodes", "none has what it requests of memory", "request less"),
    "not ready": (not_ready, "nodes", f"{TARGET}: none of 1 has the labels", "label"),
    "default class": (without_default, "storage", f"{REDIS} needs a default StorageClass", "there are: standard"),
    "metrics": (
        without_metrics,
        *("autoscaling", "custom.metrics.k8s.io is not served, for HorizontalPodAutoscaler/target", "adapter"),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_what_is_missing_fails_alone(server: ApiServer, name: str) -> None:
    change, check, found, remedy = FAILURES[name]
    change(server)
    failed = await failing()
    assert (failed["check"], failed["state"]) == (check, "fail")
    assert found in failed["found"]
    assert remedy in failed["remedy"]


async def test_no_node_is_ready(server: ApiServer) -> None:
    for name in ("gpu", "small"):
        server.object(name)["spec"]["unschedulable"] = True
    told = [item["found"] for item in await findings() if item["state"] == "fail"]
    assert told == [f"{TARGET}: no node is ready", f"{REDIS}: no node is ready"]


async def test_a_key_that_is_optional_is_no_second_line(server: ApiServer) -> None:
    optional = "{name: outrider-redis, key: kv-blocks-url, optional: true}"
    mine = OVERLAY.replace("{name: outrider-hub, key: token, optional: true}", optional)
    assert (await failing(mine))["state"] == "warn"
    server.remove("outrider-redis")
    assert (await failing(mine))["state"] == "fail"


async def test_a_namespace_that_may_not_be_read(server: ApiServer) -> None:
    server.refused["/api/v1/namespaces/outrider$"] = 403
    server.denied.add(("create", "namespaces"))
    bad = {item["check"]: item for item in await findings() if item["state"] in ("fail", "unknown")}
    assert {name: item["state"] for name, item in bad.items()} == {"permissions": "fail", "namespace": "unknown"}
    assert bad["permissions"]["found"] == "may not create namespaces", "it may be missing"


async def test_labels_of_namespaces_that_may_not_be_read_are_a_warning(server: ApiServer) -> None:
    server.refused["/api/v1/namespaces$"] = 403
    failed = await failing()
    assert (failed["check"], failed["state"]) == ("network policies", "warn")
    assert "(403)" in failed["found"]


async def test_what_is_not_required_is_a_warning(server: ApiServer) -> None:
    server.remove("outrider-hub")
    failed = await failing()
    assert (failed["check"], failed["state"]) == ("Secret", "warn")
    assert "outrider-hub (token) is missing" in failed["found"]


async def test_metrics_that_are_not_listed_yet_are_a_warning(server: ApiServer) -> None:
    server.metrics = ["pods/another"]
    failed = await failing()
    assert failed["state"] == "warn"
    assert failed["found"] == "custom.metrics.k8s.io does not list outrider_target_queued_tokens yet"


async def test_an_autoscaler_with_nothing_to_scale_needs_no_metrics(server: ApiServer) -> None:
    server.metrics = None
    failed = await failing(OVERLAY.replace("maxReplicas: 4", "maxReplicas: 2"))
    assert failed["state"] == "warn"
    assert "leave nothing to scale" in failed["found"]


async def test_a_namespace_that_nobody_makes_is_missing(server: ApiServer) -> None:
    server.objects.pop("/api/v1/namespaces/outrider")
    assert all(item["state"] in ("ok", "warn") for item in await findings()), "the overlay makes it"
    without = "---".join(part for part in OVERLAY.split("---") if "kind: Namespace\n" not in part)
    failed = await failing(without)
    assert (failed["check"], failed["found"]) == ("namespace", "outrider is missing")
    assert failed["remedy"] == "kubectl create namespace outrider"


async def test_who_may_not_make_a_namespace_needs_it_made(server: ApiServer) -> None:
    server.denied.add(("create", "namespaces"))
    assert all(item["state"] in ("ok", "warn") for item in await findings()), "it exists"
    server.objects.pop("/api/v1/namespaces/outrider")
    failed = await failing()
    assert failed["found"] == "may not create namespaces"


async def test_pods_that_the_namespace_refuses(server: ApiServer) -> None:
    failed = await failing(
        OVERLAY.replace(
            "{name: models, persistentVolumeClaim: {claimName: models}}", "{name: models, hostPath: {path: /models}}"
        )
    )
    assert failed["check"] == "namespace"
    assert failed["found"] == f"outrider is restricted: refuses {TARGET} (hostPath)"


async def test_the_level_is_that_of_the_namespace_in_the_cluster(server: ApiServer) -> None:
    server.object("outrider")["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": "baseline"}
    mine = OVERLAY.replace(", labels: {pod-security.kubernetes.io/enforce: restricted}", "")
    assert all(item["state"] in ("ok", "warn") for item in await findings(overlay=mine))
    failed = await failing(mine.replace("      priorityClassName: serving\n", "      hostNetwork: true\n"))
    assert failed["found"] == f"outrider is baseline: refuses {TARGET} (hostNetwork)"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda spec: spec["containers"][0].pop("securityContext"), ["allowPrivilegeEscalation", "capabilities.drop"]),
        (lambda spec: spec.pop("securityContext"), ["runAsNonRoot", "seccompProfile"]),
        (lambda spec: spec["securityContext"].update(runAsUser=0), ["runAsUser"]),
        (lambda spec: spec["containers"][0]["securityContext"].update(privileged=True), ["privileged"]),
        (lambda spec: spec.update(hostPID=True), ["hostPID"]),
        (lambda spec: spec.update(volumes=[{"name": "nfs", "nfs": {}}]), ["nfs"]),
        (lambda spec: None, []),
    ],
)
def test_violations_of_the_restricted_level(change: Callable[[Any], Any], problem: list[str]) -> None:
    spec = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}],
    }
    change(spec)
    assert violations(spec, "restricted") == problem
    assert violations(spec, "privileged") == []


@pytest.mark.parametrize(
    ("storage", "state", "found"),
    [
        ("storageClassName: fast, ", "fail", f"{REDIS} needs the StorageClass fast: it is missing"),
        ("storageClassName: standard, ", "ok", f"StorageClass for {REDIS} (standard)"),
        ('storageClassName: "", ', "warn", f"{REDIS} takes a PersistentVolume without a StorageClass"),
    ],
)
async def test_storage_classes(server: ApiServer, storage: str, state: str, found: str) -> None:
    mine = OVERLAY.replace("spec: {accessModes", f"spec: {{{storage}accessModes")
    (told,) = [item for item in await findings(overlay=mine) if item["check"] == "storage"]
    assert told["state"] == state and told["found"].startswith(found)


async def test_a_volume_without_a_class_may_fit_where_no_class_is_the_default(server: ApiServer) -> None:
    without_default(server)
    volume = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: disk}\nspec: {capacity: {storage: 1Gi}}\n"
    found = await findings(overlay=f"{OVERLAY}---\n{volume}")
    (told,) = [item for item in found if item["check"] == "storage"]
    assert told["state"] == "warn" and "without a StorageClass" in told["found"]


@pytest.mark.parametrize(
    ("image", "state", "found"),
    [
        ("registry.example.com/outrider/target:0.1.0", "fail", "is a placeholder"),
        ("registry.internal:5000/outrider/target", "warn", "has no fixed tag"),
        ("registry.internal:5000/outrider/target:latest", "warn", "has no fixed tag"),
        ("outrider/target:local\n          imagePullPolicy: IfNotPresent", "warn", "names no registry"),
        ("registry.internal/outrider/target@sha256:1234", "ok", "2 named, with fixed tags"),
        ("myexample.com/outrider/target:0.1.0", "ok", "2 named, with fixed tags"),
    ],
)
async def test_images(server: ApiServer, image: str, state: str, found: str) -> None:
    mine = OVERLAY.replace("registry.internal:5000/outrider/target:0.1.0", image)
    (told,) = [item for item in await findings(overlay=mine) if item["check"] == "images"]
    assert told["state"] == state and found in told["found"]


async def test_placeholders_elsewhere(server: ApiServer) -> None:
    failed = await failing(OVERLAY.replace("llm.internal", "llm.example.org"))
    assert (failed["check"], failed["state"]) == ("placeholders", "fail")
    assert failed["found"] == "HTTPRoute/outrider has llm.example.org at spec.hostnames[0]"


async def test_policies_for_namespaces_that_do_not_exist(server: ApiServer) -> None:
    server.remove("monitoring")
    failed = await failing()
    assert (failed["check"], failed["state"]) == ("network policies", "warn")
    assert failed["remedy"] == "kubectl label namespace NAMESPACE outrider.dev/monitoring=true"


@pytest.mark.parametrize(
    ("path", "check"),
    [
        ("/api/v1/nodes", "nodes"),
        ("/api/v1/namespaces/outrider/secrets", "Secret"),
        ("/api/v1/namespaces/outrider/persistentvolumeclaims", "PersistentVolumeClaim"),
        ("/apis/storage.k8s.io", "storage"),
        ("/apis/custom.metrics.k8s.io", "autoscaling"),
        ("/apis/authorization.k8s.io", "permissions"),
    ],
)
async def test_what_may_not_be_read_is_unknown(server: ApiServer, path: str, check: str) -> None:
    server.refused[path] = 403
    failed = await failing()
    assert (failed["check"], failed["state"]) == (check, "unknown")
    assert failed["found"].startswith("cannot be checked: ") and "(403)" in failed["found"]
    assert (check != "Secret") or "required: outrider-redis (sessions-url)" in failed["found"]
    assert failed["remedy"] == "ask somebody who may read it"


async def test_a_failure_of_the_server_is_unknown(server: ApiServer) -> None:
    server.refused["/api/v1/nodes"] = 500
    failed = await failing()
    assert (failed["state"], failed["remedy"]) == ("unknown", "")


async def test_lists_come_in_pages(server: ApiServer) -> None:
    server.page_len = 1
    assert all(item["state"] in ("ok", "warn") for item in await findings())
    assert sum(path == "/api/v1/nodes" for _, path in server.requests) == 2


async def test_a_server_out_of_reach(server: ApiServer) -> None:
    (told,) = await findings("--overlay", "-", "--context", "nowhere")
    assert (told["check"], told["state"]) == ("API server", "fail")
    assert "not reachable" in told["found"]


async def test_a_server_that_does_not_answer(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster_reader, "CALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server.port = silent.getsockname()[1]
        server.kubeconfig(tmp_path)
        (told,) = await findings()
    assert told["found"] == "not reachable: no answer within 0.2 s"


@pytest.mark.parametrize("version", [{"major": "", "minor": ""}, {}])
async def test_a_version_that_cannot_be_read_is_unknown(server: ApiServer, version: Any) -> None:
    server.version = version
    assert (await failing())["state"] == "unknown"


async def test_an_answer_that_is_no_object(server: ApiServer) -> None:
    server.version = ["1.31"]
    (told,) = await findings()
    assert told["found"] == "not reachable: /version: the answer is no JSON object"


async def test_without_an_overlay_only_the_server_is_checked(server: ApiServer) -> None:
    told = await findings("--context", "here")
    assert [item["check"] for item in told] == ["API server", "overlay"]


@pytest.mark.parametrize(
    ("arguments", "text", "error"),
    [
        (("--overlay", "-"), "", "standard input has no objects"),
        (("--overlay", "-"), "a: [", "standard input is no YAML"),
        (("--overlay", "-"), "just: text", "standard input has a document that is no Kubernetes object"),
        (("--overlay", "-"), "[1, 2]", "standard input has a document that is no Kubernetes object"),
        (
            ("--overlay", "-", "--namespace", "x"),
            OVERLAY,
            "namespace is x, the objects of standard input have outrider",
        ),
        (("--overlay", "/nowhere"), "", "cannot read /nowhere: No such file or directory"),
        (("--overlay", "-", "--context", "strange"), OVERLAY, "no cluster to connect to"),
        (("--overlay", "-", "--model", "x"), OVERLAY, "--model is of this machine: not with --kubernetes"),
    ],
)
async def test_wrong_input_is_one_error(server: ApiServer, arguments: tuple[str, ...], text: str, error: str) -> None:
    done = await doctor(*arguments, overlay=text)
    assert done.exit_code == 2
    assert error in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


async def test_an_object_without_what_its_kind_requires_is_one_error(server: ApiServer) -> None:
    done = await doctor(overlay=OVERLAY.replace("  secretName: outrider-target-tls\n", ""))
    assert done.exit_code == 2
    assert "an object is not valid: KeyError 'secretName'" in done.stderr


def test_options_of_a_cluster_go_with_kubernetes() -> None:
    done = CliRunner().invoke(main, ["doctor", "--overlay", "k8s"])
    assert (done.exit_code, done.stderr) == (2, "outrider: error: --overlay goes with --kubernetes\n")


def test_no_kubeconfig_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    done = CliRunner().invoke(main, ["doctor", "--kubernetes"])
    assert done.exit_code == 2
    assert (
        done.stderr.startswith("outrider: error: kubeconfig: no cluster to connect to") and done.stderr.count("\n") == 1
    )


def test_a_list_and_objects_without_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: dict[str, Any] = {"kind": "List", "apiVersion": "v1", "items": list(yaml.safe_load_all(OVERLAY))}
    monkeypatch.setattr(
        "sys.stdin",
        io.StringIO(
            json.dumps(listed).replace('"namespace": "outrider", ', "").replace(', "namespace": "outrider"', "")
        ),
    )
    overlay = read_overlay("-", "mine")
    assert len(overlay.objects) == len(listed["items"])
    assert overlay.namespaces == ["mine"]


def test_a_kustomization_that_cannot_be_rendered(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"kubectl kustomize .*kustomization"):
        read_overlay(str(tmp_path))


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ('{"clientVersion": {"major": "1", "minor": "20"}}', r"kubectl is of 1\.20: take one of 1\.30 or newer"),
        ('{"clientVersion": {"major": "1", "minor": "30+"}}', r"unknown field$"),
        ("no JSON", r"unknown field$"),
        ('{"clientVersion": null}', r"unknown field$"),
    ],
)
def test_a_kubectl_that_is_too_old_is_named(
    version: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(
        f"#!/bin/sh\nif [ \"$1\" = version ]; then echo '{version}'; exit 0; fi\n"
        "echo 'error: json: unknown field' >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidArgument, match=problem):
        read_overlay(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("4Gi", 2**32), ("2", 2), (3, 3), ("1e3", 1000), ("5M", 5e6), ("1E", 1e18)]
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "4GiB", "much"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is no quantity"):
        quantity(text)


@pytest.mark.parametrize("name", OVERLAYS)
async def test_our_own_overlays_are_read(server: ApiServer, name: str) -> None:
    folder = str(K8S / "overlays" / name)
    overlay = await asyncio.to_thread(read_overlay, folder)
    server.serve(overlay.objects)
    told = await findings("--overlay", folder)
    checks = {item["check"]: item for item in told}
    assert {"API server", "version", "kinds", "permissions", "nodes", "images"} <= set(checks)
    for check in ("API server", "version", "kinds", "permissions", "namespace"):
        assert checks[check]["state"] == "ok", checks[check]
    placeholders = [item for item in told if item["check"] == "images" and item["state"] == "fail"]
    assert bool(placeholders) is (name == "production"), "its registry is a placeholder until somebody names theirs"
