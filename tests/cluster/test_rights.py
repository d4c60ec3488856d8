"""Least privilege: what the manifests do not grant is refused, by the API server itself."""

import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from tests.cluster.deployed import NAMESPACE, Deployed
from tests.k8s.rendering import SERVICES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
_ACCOUNTS = (*SERVICES, "redis-sessions", "redis-kv-blocks")
_NO_ACCOUNT = "stranger"
_GRANTED = {("orchestrator", "discovery.k8s.io", "endpointslices", verb) for verb in ("get", "list", "watch")}
_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


def _resources(deployed: Deployed) -> list[tuple[str, str]]:
    """Returns group and resource of everything that the server has, subresources too."""
    found = set()
    versions = ["/api/v1"]
    for group in deployed.node.call("GET", "/apis")["groups"]:
        versions.append(f"/apis/{group['preferredVersion']['groupVersion']}")
    for version in versions:
        group = "" if version == "/api/v1" else version.split("/")[2]
        found |= {(group, item["name"]) for item in deployed.node.call("GET", version)["resources"]}
    return sorted(found)


def _may(deployed: Deployed, account: str, namespace: str, group: str, resource: str, verb: str) -> bool:
    name, _, subresource = resource.partition("/")
    place = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource}
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated"]
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": place},
    }
    return bool(
        deployed.node.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"]
    )


def test_accounts_may_do_what_the_manifests_grant_and_nothing_else(
    markov: Deployed, record_property: Callable[[str, object], None]
) -> None:
    resources, granted, num_refused = _resources(markov), set(), 0
    for group, resource in resources:
        for verb in _VERBS:
            # What every account may do that there is, such as ask for its own rights.
            if _may(markov, _NO_ACCOUNT, NAMESPACE, group, resource, verb):
                continue
            for account in _ACCOUNTS:
                if _may(markov, account, NAMESPACE, group, resource, verb):
                    granted.add((account, group, resource, verb))
                else:
                    num_refused += 1
    record_property("num_refused", num_refused)
    record_property("num_granted", len(granted))
    assert granted == _GRANTED
    assert num_refused > 1000


@pytest.mark.parametrize("namespace", ["default", "kube-system", ""])
def test_nothing_is_granted_elsewhere(markov: Deployed, namespace: str) -> None:
    for account in _ACCOUNTS:
        for group, resource in (("discovery.k8s.io", "endpointslices"), ("", "secrets"), ("", "pods"), ("", "nodes")):
            for verb in _VERBS:
                assert not _may(markov, account, namespace, group, resource, verb), (account, resource, verb)


def test_a_pod_s_own_token_is_refused_what_is_not_granted(markov: Deployed) -> None:
    pod = markov.ready_pods("orchestrator")[0]["metadata"]["name"]
    token = markov.exec(pod, "cat", _TOKEN)

    def status(path: str) -> int:
        request = urllib.request.Request(f"{markov.node.url}{path}", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=20, context=markov.node.trust) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    slices = "/apis/discovery.k8s.io/v1beta1"
    assert status(f"{slices}/namespaces/{NAMESPACE}/endpointslices") == 200
    for path in (
        f"{slices}/endpointslices",
        f"{slices}/namespaces/default/endpointslices",
        f"/api/v1/namespaces/{NAMESPACE}/secrets",
        f"/api/v1/namespaces/{NAMESPACE}/pods",
        f"/api/v1/namespaces/{NAMESPACE}/secrets/outrider-redis",
        "/api/v1/nodes",
    ):
        assert status(path) == 403, path


@pytest.mark.parametrize("component", ["draft", "target", "redis-sessions", "redis-kv-blocks"])
def test_who_needs_no_account_has_no_token(markov: Deployed, component: str) -> None:
    (pod, *_) = markov.ready_pods(component)
    assert not [volume for volume in pod["spec"].get("volumes", ()) if "secret" in volume or "projected" in volume]
    assert "No such file" in markov.exec(pod["metadata"]["name"], "cat", _TOKEN, is_checked=False)


def test_can_i_says_the_same(markov: Deployed) -> None:
    def answer(account: str, verb: str, resource: str) -> str:
        arguments = (
            "auth",
            "can-i",
            verb,
            resource,
            f"--as=system:serviceaccount:{NAMESPACE}:{account}",
            f"--namespace={NAMESPACE}",
        )
        return markov.node.kubectl(*arguments, is_checked=False).split()[-1]

    assert answer("orchestrator", "watch", "endpointslices.discovery.k8s.io") == "yes"
    assert answer("orchestrator", "delete", "endpointslices.discovery.k8s.io") == "no"
    assert answer("orchestrator", "get", "secrets") == "no"
    assert answer("target", "list", "endpointslices.discovery.k8s.io") == "no"
