"""`outrider plan`: how many replicas of each service a load needs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outrider.cli.capacity_plan import Fleet, Measurements, Wanted, best_rate, plan
from outrider.cli.examples import ExampleCommand
from outrider.errors import InvalidArgument

_FLOATS = click.FloatRange(0)
_SPARE = 2


@click.command(
    cls=ExampleCommand,
    name="plan",
    short_help="Compute how many replicas of each service a load needs.",
    examples=(
        "outrider plan --sessions 500 --rate 20 --pass-s 0.02 --row-s 5e-5 --draft-step-s 0.003 --acceptance 0.75",
        "outrider plan ... --hit-rate 0.7 --rtt-s 0.002 --draft-cost 0.2 --patch k8s/overlays/production/plan",
    ),
)
@click.option(
    "--sessions", "num_sessions", type=click.IntRange(1), required=True, help="Sessions that generate at once."
)
@click.option("--rate", type=_FLOATS, required=True, help="Tokens a second that each gets, at least.")
@click.option("--pass-s", type=_FLOATS, required=True, help="Seconds of a target's pass, rows aside.")
@click.option("--row-s", type=_FLOATS, default=0.0, show_default=True, help="Seconds that a row adds to it.")
@click.option("--draft-step-s", type=_FLOATS, required=True, help="Seconds of a draft's step, rows aside.")
@click.option("--draft-row-s", type=_FLOATS, default=0.0, show_default=True, help="Seconds that a session adds to it.")
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    required=True,
    help="Probability that a drafted token is accepted, given those before it.",
)
@click.option("--rtt-s", type=_FLOATS, default=0.001, show_default=True, help="Seconds from target to draft and back.")
@click.option(
    "--hit-rate",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Rounds whose proposal is there at once, because drafts run ahead; 0: they wait for verdicts.",
)
@click.option(
    "--rest-s", type=_FLOATS, default=0.001, show_default=True, help="Seconds of a round beside all that, a session."
)
@click.option(
    "--max-sessions", type=click.IntRange(1), default=256, show_default=True, help="Sessions a target has memory for."
)
@click.option(
    "--num-speculative-tokens", type=click.IntRange(0, 64), default=7, show_default=True, help="Longest main line."
)
@click.option("--draft-cost", type=_FLOATS, default=0.25, show_default=True, help="Of a draft, where a target costs 1.")
@click.option(
    "--sessions-per-orchestrator",
    type=click.IntRange(1),
    default=160,
    show_default=True,
    help="As one process carries.",
)
@click.option(
    "--patch",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a kustomize component there that gives the autoscalers the numbers of the fleet with separate drafts.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object.")
def plan_command(patch: Path | None, wants_json: bool, **values: Any) -> None:
    """Compute targets, drafts and orchestrators for a load, from measured times, and what drafts gain.

    Compares three fleets that give every session the rate: plain decoding, drafting within the target's process, and
    drafts of their own; costs are in targets. docs/operations.md ("How many replicas") names the metrics of a running
    stack that each value comes from.
    """
    measured = Measurements(**{name: values.pop(name) for name in Measurements.__dataclass_fields__})
    wanted = Wanted(**values)
    fleets = plan(measured, wanted)
    if not fleets:
        most = best_rate(measured, wanted)
        raise InvalidArgument(
            f"no fleet gives {wanted.rate:g} tokens a second to a session, {most:.3g} at most", "rate"
        )
    cheapest = min(fleets, key=lambda fleet: fleet.cost)
    if patch is not None:
        _write(patch, fleets)
    if wants_json:
        click.echo(json.dumps({"fleets": [asdict(fleet) for fleet in fleets], "cheapest": cheapest.kind}))
        return
    Console().print(_table(fleets, cheapest))
    if patch is not None:
        click.echo(f"written: {patch}; name it under `components` in your overlay")


def _table(fleets: list[Fleet], cheapest: Fleet) -> Table:
    names = ("targets", "drafts", "orchestrators", "drafted", "tokens/s", "cost", "of plain")
    table = Table("fleet", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    plain = next((fleet.cost for fleet in fleets if fleet.kind == "plain"), None)
    for fleet in fleets:
        table.add_row(
            fleet.kind,
            str(fleet.num_targets),
            str(fleet.num_drafts),
            str(fleet.num_orchestrators),
            str(fleet.num_speculative_tokens),
            f"{fleet.rate:.1f}",
            f"{fleet.cost:.4g}",
            "" if plain is None else f"{fleet.cost / plain:.2f}",
            style="bold" if fleet is cheapest else None,
        )
    return table


def _write(folder: Path, fleets: list[Fleet]) -> None:
    """Write a component that makes the autoscalers start at the fleet of separate drafts and grow to twice its size."""
    fleet = next((fleet for fleet in fleets if fleet.kind == "separate"), None)
    if fleet is None:
        raise InvalidArgument("no fleet with drafts of its own does this, so there is nothing to write", "patch")
    folder.mkdir(parents=True, exist_ok=True)
    nums = {"orchestrator": fleet.num_orchestrators, "target": fleet.num_targets, "draft": fleet.num_drafts}
    lines = [
        "# Written by `outrider plan`.",
        "apiVersion: kustomize.config.k8s.io/v1alpha1",
        "kind: Component",
        "patches:",
    ]
    for service, num in nums.items():
        lines += [
            "  - target:",
            "      kind: HorizontalPodAutoscaler",
            f"      name: {service}",
            "    patch: |",
            "      - op: replace",
            "        path: /spec/minReplicas",
            f"        value: {max(1, num)}",
            "      - op: replace",
            "        path: /spec/maxReplicas",
            f"        value: {max(1, _SPARE * num)}",
        ]
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n")
