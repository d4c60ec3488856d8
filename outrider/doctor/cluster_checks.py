"""The prerequisites of a deployment, checked against a cluster's API server.

What is required follows from the objects of the overlay, whoever made it: no check has a list of what Outrider's own
overlays contain. Nothing is changed in the cluster, and values of Secrets are not part of any finding.
"""

from functools import partial
from typing import Final

from outrider.discovery.cluster import ApiError, Cluster
from outrider.doctor import capacity_checks, cluster_reader, name_checks, reference_checks, server_checks
from outrider.doctor.cluster_reader import ClusterReader, all_of, run
from outrider.doctor.finding import Finding, State
from outrider.doctor.overlay import Overlay
from outrider.errors import InvalidArgument

_CHECKS: Final = (
    ("version", server_checks.check_version),
    ("kinds", server_checks.check_kinds),
    ("permissions", server_checks.check_permissions),
    ("namespace", server_checks.check_namespaces),
    ("references", reference_checks.check_references),
    ("nodes", capacity_checks.check_room),
    ("storage", capacity_checks.check_storage),
    ("autoscaling", capacity_checks.check_autoscaling),
    ("network policies", capacity_checks.check_network_policies),
)


async def check_cluster(cluster: Cluster, overlay: Overlay | None) -> list[Finding]:
    """Return the findings about a cluster, in the order of the checks.

    Args:
        cluster: the cluster.
        overlay: what is to be deployed; None checks the server alone.

    Raises:
        InvalidArgument: there is no cluster to connect to, or an object of the overlay lacks what its kind requires.
    """
    try:
        version = await cluster.request("GET", "/version", timeout_s=cluster_reader.CALL_S)
    except ApiError as error:
        remedy = "look at the server's address, the network between, and your credentials"
        return [Finding("API server", State.FAILS, f"not reachable: {error}", remedy)]
    found = [Finding("API server", State.HOLDS, f"reachable, {version.get('gitVersion', 'of an unknown version')}")]
    if overlay is None:
        remedy = "--overlay FOLDER checks what it needs"
        return [*found, Finding("overlay", State.ADVICE, "none is given: nothing else is checked", remedy)]
    try:
        return found + await _check_overlay(ClusterReader(cluster, version), overlay)
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidArgument(f"an object is not valid: {type(error).__name__} {error}", "overlay") from error


async def _check_overlay(reader: ClusterReader, overlay: Overlay) -> list[Finding]:
    found = await all_of(*(run(name, partial(check, reader, overlay)) for name, check in _CHECKS))
    found += [name_checks.check_images(overlay), name_checks.check_placeholders(overlay)]
    return [finding for findings in found for finding in findings]
