"""`outrider doctor`: what is missing before a stack can run, on this machine or in a cluster."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from outrider.cli.examples import ExampleCommand
from outrider.cli.stack_arguments import variable_option
from outrider.cli.up import ADDRESS, HTTP_ADDRESS
from outrider.discovery.cluster import Cluster
from outrider.doctor.cluster_checks import check_cluster
from outrider.doctor.finding import Finding, State
from outrider.doctor.machine_checks import LocalStackPlan, check_machine
from outrider.doctor.overlay import Overlay, read_overlay
from outrider.errors import DeadlineExceeded, Unavailable

_ALL_S: Final = 180.0
"""Bound on all checks of a cluster together."""
_OF_A_CLUSTER: Final = ("context", "namespace", "overlay")
_OF_A_MACHINE: Final = ("model", "draft_model", "device", "redis_url")
_IN_A_POD: Final = "KUBERNETES_SERVICE_HOST"


@click.command(
    cls=ExampleCommand,
    short_help="Check what a stack requires, here or in a cluster.",
    examples=(
        "outrider doctor --model ./llama --device cuda",
        "outrider doctor --kubernetes --overlay k8s/overlays/production",
        "kubectl kustomize ./mine | outrider doctor --kubernetes --context staging --overlay -",
    ),
)
@variable_option(
    "--model", variable="OUTRIDER_MODEL", default="embedded", show_default=True, help="The target's model."
)
@click.option("--draft-model", default="", help="The draft's model, where it has one of its own.")
@variable_option(
    "--device", variable="OUTRIDER_DEVICE", default="", help="cpu, cuda, ... [default: a GPU where there is one]"
)
@variable_option("--redis-url", variable="OUTRIDER_REDIS_URL", default="", help="Redis. [default: an embedded one]")
@click.option("--kubernetes", is_flag=True, help="Check a cluster, by its API server, and nothing of this machine.")
@click.option(
    "--context", "context_name", default="", metavar="NAME", help="Context of the kubeconfig. [default: current]"
)
@click.option("--namespace", default="", metavar="NAME", help="Of objects that name none. [default: default]")
@click.option(
    "--overlay",
    "place",
    default="",
    metavar="FOLDER",
    help="What is to be deployed: a folder with a kustomization, a file with rendered objects, or - for the input.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def doctor(
    context: click.Context,
    model: str,
    draft_model: str,
    device: str,
    redis_url: str,
    kubernetes: bool,
    context_name: str,
    namespace: str,
    place: str,
    wants_json: bool,
) -> None:
    """Check what `outrider up` requires of this machine; with --kubernetes, what an overlay requires of a cluster.

    Each line is one prerequisite: ok, warn (not required), fail, or unknown (required, and could not be checked), with
    what was found and what to do. The exit code is 0 only where all that is required holds.

    What a cluster must have is read from the rendered overlay: kinds and their operators, permissions, namespaces,
    Secrets and other objects that it names, nodes, storage, metrics. The cluster is that of KUBECONFIG, else of
    ~/.kube/config, else the pod's own; nothing in it is changed. It takes the package `kubernetes`.
    """
    _check_given(context, kubernetes)
    if kubernetes:
        overlay = read_overlay(place, namespace) if place else None
        found = asyncio.run(_check_cluster(context_name, overlay))
    else:
        addresses = (ADDRESS, HTTP_ADDRESS)
        found = check_machine(LocalStackPlan(model, draft_model, device, redis_url, addresses))
    bad = [finding for finding in found if finding.state in (State.FAILS, State.UNKNOWN)]
    if wants_json:
        click.echo(json.dumps({"ok": not bad, "findings": [_as_json(finding) for finding in found]}))
    else:
        for finding in found:
            click.echo(_line(finding))
    if bad:
        num = sum(finding.state is State.FAILS for finding in bad)
        raise click.ClickException(
            f"{num} of {len(found)} prerequisites do not hold, {len(bad) - num} could not be checked"
        )


def _check_given(context: click.Context, kubernetes: bool) -> None:
    """Raise `UsageError` for an option that belongs to the other kind of check."""
    for parameter in context.command.params:
        if context.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
            continue
        option = parameter.opts[0]
        name = option.removeprefix("--").replace("-", "_")
        if kubernetes and name in _OF_A_MACHINE:
            raise click.UsageError(f"{option} is of this machine: not with --kubernetes")
        if not kubernetes and name in _OF_A_CLUSTER:
            raise click.UsageError(f"{option} goes with --kubernetes")


async def _check_cluster(context: str, overlay: Overlay | None) -> list[Finding]:
    cluster = Cluster(_kubeconfig(), context)
    try:
        async with asyncio.timeout(_ALL_S):
            return await check_cluster(cluster, overlay)
    except TimeoutError:
        raise DeadlineExceeded(f"the checks took more than {_ALL_S:g} s") from None
    except ModuleNotFoundError as error:
        raise Unavailable(f"the package {error.name} is not installed: pip install 'outrider[local]'") from None
    finally:
        await cluster.close()


def _kubeconfig() -> Path | None:
    """Return the kubeconfig that kubectl would take; None in a pod that has none."""
    given = os.environ.get("KUBECONFIG")
    path = Path(given) if given else Path.home() / ".kube" / "config"
    return None if not given and not path.exists() and os.environ.get(_IN_A_POD) else path


def _line(finding: Finding) -> str:
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{finding.state.value:<8} {finding.check:<17} {finding.found}{remedy}"


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "state": finding.state.value,
        "found": finding.found,
        "remedy": finding.remedy,
    }
