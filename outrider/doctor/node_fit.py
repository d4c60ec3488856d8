"""Which nodes can take a pod."""

from collections import defaultdict
from collections.abc import Mapping

from outrider.doctor.cluster_reader import labels_of
from outrider.doctor.finding import Finding, State, listed
from outrider.doctor.overlay import Manifest, PodTemplate, quantity


def _is_ready(node: Manifest) -> bool:
    conditions = {item["type"]: item["status"] for item in (node.get("status") or {}).get("conditions") or ()}
    return conditions.get("Ready") == "True" and not (node.get("spec") or {}).get("unschedulable")


def check_nodes(template: PodTemplate, nodes: list[Manifest]) -> Finding:
    """Return whether a node can take the pods of a template when nothing else runs on it, and else why none can.

    A node is looked at as the scheduler does: it is ready, has the labels that are selected, no taint that is not
    tolerated, and as much of each resource as a pod requests. What runs there already is not looked at.

    Args:
        template: the pods.
        nodes: all nodes of the cluster.
    """
    nodes = [node for node in nodes if _is_ready(node)]
    if not nodes:
        return Finding("nodes", State.FAILS, f"{template.owner}: no node is ready", "kubectl get nodes")
    labelled = [node for node in nodes if _is_selected(template.spec, node)]
    if not labelled:
        wanted = template.spec.get("nodeSelector") or {}
        pairs = " ".join(f"{key}={value}" for key, value in sorted(wanted.items()))
        remedy = f"kubectl label node NODE {pairs}" if pairs else "label nodes as its affinity demands"
        return Finding(
            "nodes", State.FAILS, f"{template.owner}: none of {len(nodes)} has the labels it selects", remedy
        )
    tolerated = [node for node in labelled if not _untolerated(template.spec, node)]
    if not tolerated:
        taints = listed(taint for node in labelled for taint in _untolerated(template.spec, node))
        text = f"{template.owner}: {len(labelled)} selected, with taints that it does not tolerate: {taints}"
        return Finding("nodes", State.FAILS, text, "tolerate them in the overlay, or take them away")
    requests = _requests(template.spec)
    roomy = [node for node in tolerated if not _lacking(requests, node)]
    if not roomy:
        lacking = listed(name for node in tolerated for name in _lacking(requests, node))
        is_device = "/" in lacking
        remedy = (
            "install the device plug-in, or label other nodes" if is_device else "request less, or label larger nodes"
        )
        text = f"{template.owner}: {len(tolerated)} selected, none has what it requests of {lacking}"
        return Finding("nodes", State.FAILS, text, remedy)
    return Finding("nodes", State.HOLDS, f"{template.owner}: {len(roomy)} of {len(nodes)} can take it when empty")


def _is_selected(spec: Manifest, node: Manifest) -> bool:
    labels = labels_of(node)
    if not (spec.get("nodeSelector") or {}).items() <= labels.items():
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or ()
    return not terms or any(all(_meets(rule, labels) for rule in term.get("matchExpressions") or ()) for term in terms)


def _meets(rule: Manifest, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), list(rule.get("values") or ())
    match rule["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and value.isdecimal() and int(value) > int(values[0])
        case "Lt":
            return value is not None and value.isdecimal() and int(value) < int(values[0])
    return False


def _untolerated(spec: Manifest, node: Manifest) -> list[str]:
    """Return a node's taints that keep the pods away."""
    return [
        f"{taint['key']}={taint.get('value', '')}:{taint['effect']}"
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint["effect"] != "PreferNoSchedule"
        and not any(_tolerates(toleration, taint) for toleration in spec.get("tolerations") or ())
    ]


def _tolerates(toleration: Manifest, taint: Manifest) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or "")


def _requests(spec: Manifest) -> dict[str, float]:
    """Return what a pod requests: of all containers together, or of the largest that runs before them."""
    total: dict[str, float] = defaultdict(float)
    for container in spec["containers"]:
        for name, amount in _requested(container).items():
            total[name] += amount
    for container in spec.get("initContainers") or ():
        for name, amount in _requested(container).items():
            total[name] = max(total[name], amount)
    return total


def _requested(container: Manifest) -> dict[str, float]:
    resources = container.get("resources") or {}
    # A limit without a request is the request too, as it always is for devices.
    both = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(amount) for name, amount in both.items()}


def _lacking(requests: Mapping[str, float], node: Manifest) -> list[str]:
    """Return the resources of which a node has less than a pod requests, whatever runs there."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return [name for name, amount in requests.items() if quantity(allocatable.get(name, 0)) < amount]
