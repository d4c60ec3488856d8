"""The autoscalers of `k8s/base` in a closed loop: from few sessions to many and back, in simulated time.

Real are the services' metrics code, the settings, thresholds and behaviours that are deployed, and how Prometheus and
its adapter are told to collect; the HorizontalPodAutoscaler is its published algorithm (`bench.hpa`). Simulated are the
pods (`bench.simulated_fleet`): how long rounds take follows from measured times of models by the formulas of `outrider
plan`, with which the fleets are compared.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.deployed import DRAFT, ORCHESTRATOR, SERVICES, TARGET, Deployed, deployed
from bench.hpa import SYNC_S, Autoscaler
from bench.progress import progress
from bench.result import BenchResult, machine, median, quantile
from bench.simulated_fleet import Fleet, Work
from outrider.errors import InvalidArgument
from outrider.planning import Fleet as PlannedFleet
from outrider.planning import Measurements, Wanted, plan

_SHARE: Final = 0.95
"""Of the sessions that must get the objective for it to count as met."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is simulated.

    The times of the models are those measured on one core of a CPU, of a target of 1B parameters and a draft a tenth as
    large (docs/performance.md), on which a target serves a handful of sessions. `speed` divides them all, so that they
    become about those of a GPU, on which a pass takes some milliseconds. `rest_s` and `rtt_s` are no times of models.

    Attributes:
        low: sessions before and after.
        high: sessions in between.
        low_s: seconds before the rise.
        ramp_s: seconds of the rise.
        hold_s: seconds from the begin of the rise to the fall, which is at once: clients end the turn that they are at.
        fall_s: seconds after that.
        rate: tokens a second that each session should get, at least.
        first_token_s: seconds in which each request should have its first token.
        prompt_len: tokens of a turn's prompt, on average.
        num_tokens: output tokens of a turn, on average.
        turns: of a conversation; each goes to the target that has the ones before in its KV cache, if it has a place.
        speed: how many times as fast as measured the models are.
        pass_s: seconds of a target's pass, rows aside.
        row_s: seconds that a row adds to it.
        draft_step_s: seconds of a draft's step, rows aside.
        draft_row_s: seconds that a session adds to it.
        acceptance: probability that a drafted token is accepted.
        hit_rate: share of rounds whose proposal is there at once.
        rtt_s: seconds from target to draft and back.
        rest_s: seconds of all else that a round takes, for each session.
        kv_token_bytes: KV cache of a token: 16 layers of 8 heads of 64 numbers, twice, in bfloat16.
        target_start_s: seconds until a new target is ready.
        draft_start_s: likewise of a draft.
        orchestrator_start_s: likewise of an orchestrator.
        step_s: seconds of a step of the simulation.
        sample_s: seconds of a row of the result.
        seed: of the lengths of prompts and outputs.
        manifests: the folder `k8s`; empty takes the checkout's own.
    """

    low: int = 10
    high: int = 500
    low_s: float = 300.0
    ramp_s: float = 60.0
    hold_s: float = 1200.0
    fall_s: float = 1500.0
    rate: float = 10.0
    first_token_s: float = 2.0
    prompt_len: int = 128
    num_tokens: int = 256
    turns: int = 3
    speed: float = 25.0
    pass_s: float = 0.0936
    row_s: float = 0.00534
    draft_step_s: float = 0.0115
    draft_row_s: float = 0.0013
    acceptance: float = 0.8
    hit_rate: float = 0.7
    rtt_s: float = 0.001
    rest_s: float = 0.0003
    kv_token_bytes: int = 32768
    target_start_s: float = 90.0
    draft_start_s: float = 60.0
    orchestrator_start_s: float = 10.0
    step_s: float = 0.5
    sample_s: float = 15.0
    seed: int = 0
    manifests: str = ""

    def __post_init__(self) -> None:
        for name in ("low", "high", "hold_s", "rate", "prompt_len", "num_tokens", "turns", "speed", "step_s"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}, must be positive", name)
        if not self.step_s <= self.sample_s <= self.hold_s:
            raise InvalidArgument(f"sample_s is {self.sample_s:g}, must be between step_s and hold_s", "sample_s")

    @property
    def measured(self) -> Measurements:
        """What `outrider plan` takes: the times of the models, as fast as they are here."""
        return Measurements(
            pass_s=self.pass_s / self.speed,
            row_s=self.row_s / self.speed,
            draft_step_s=self.draft_step_s / self.speed,
            draft_row_s=self.draft_row_s / self.speed,
            acceptance=self.acceptance,
            rtt_s=self.rtt_s,
            hit_rate=self.hit_rate,
            rest_s=self.rest_s,
        )

    @property
    def fall_at_s(self) -> float:
        """When the sessions become few again."""
        return self.low_s + self.hold_s

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.fall_at_s + self.fall_s

    def sessions(self, now: float) -> int:
        """Returns how many sessions there should be."""
        if not self.low_s <= now < self.fall_at_s:
            return self.low
        part = min(1.0, (now - self.low_s) / self.ramp_s) if self.ramp_s else 1.0
        return round(self.low + part * (self.high - self.low))


async def measure(options: Options) -> BenchResult:
    """Simulates it all."""
    site = deployed(options.manifests)
    starts = {
        TARGET: options.target_start_s,
        DRAFT: options.draft_start_s,
        ORCHESTRATOR: options.orchestrator_start_s,
    }
    work = Work(
        options.prompt_len,
        options.num_tokens,
        options.turns,
        options.first_token_s,
        options.kv_token_bytes,
        options.seed,
    )
    loop = _Loop(options, site, Fleet(site, options.measured, work, starts))
    num_samples = round(options.end_s / options.sample_s)
    with progress(num_samples) as step:
        for number in range(num_samples):
            step("from few sessions to many and back")
            loop.run_until((number + 1) * options.sample_s)
    config = {**machine(), **asdict(options)}
    return BenchResult("autoscale", config, loop.rows, _figures(options, site, loop))


class _Loop:
    """The fleet and its autoscalers.

    Attributes:
        fleet: the fleet.
        rows: what was, sample by sample.
        wanted: replicas that each service was to have, look by look, beginning with those it began with.
    """

    def __init__(self, options: Options, site: Deployed, fleet: Fleet) -> None:
        self._options = options
        self.fleet = fleet
        self.rows: list[dict[str, Any]] = []
        self._scalers = {name: Autoscaler(site.scalers[name], lambda: fleet.now) for name in SERVICES}
        self.wanted = {name: [site.scalers[name].least] for name in SERVICES}
        self._next_look_s = SYNC_S

    def run_until(self, end_s: float) -> None:
        """Runs for a sample, and adds its row."""
        fleet, step_s = self.fleet, self._options.step_s
        for client in fleet.clients:
            client.num_tokens = client.decoding_s = 0.0
            client.was_late = False
        fleet.first_tokens_s.clear()
        while fleet.now < end_s - step_s / 2:
            fleet.num_wanted = self._options.sessions(fleet.now)
            fleet.run(step_s)
            if fleet.now >= self._next_look_s:
                self._next_look_s += SYNC_S
                self._look()
        self.rows.append(self._row())

    def _look(self) -> None:
        for service, scaler in self._scalers.items():
            wanted = self.wanted[service]
            wanted.append(scaler.look(wanted[-1], self.fleet.seen(service)))
            self.fleet.scale(service, wanted[-1])

    def _row(self) -> dict[str, Any]:
        fleet, options = self.fleet, self._options
        clients = [client for client in fleet.clients if client.decoding_s or client.was_late]
        rates = [client.num_tokens / client.decoding_s for client in clients if client.decoding_s]
        num_served = sum(
            not client.was_late and client.num_tokens >= options.rate * client.decoding_s for client in clients
        )
        row: dict[str, Any] = {"time_s": fleet.now, "sessions": len(fleet.clients)}
        for service in SERVICES:
            row[f"{service}s"] = self.wanted[service][-1]
            row[f"{service}s_ready"] = sum(pod.is_in_rotation for pod in fleet.pods(service))
        return row | {
            "waiting": fleet.num_waiting,
            "rate": median(rates) if rates else 0.0,
            "rate_p5": quantile(rates, 0.05) if rates else 0.0,
            "first_token_p95_s": quantile(fleet.first_tokens_s, 0.95) if fleet.first_tokens_s else None,
            "share_served": num_served / len(clients) if clients else 1.0,
        }


def _figures(options: Options, site: Deployed, loop: _Loop) -> dict[str, float]:
    held = [row for row in loop.rows if options.low_s < row["time_s"] <= options.fall_at_s]
    after = [row for row in loop.rows if row["time_s"] > options.fall_at_s]
    figures: dict[str, float] = {}
    served_s = served_since(held, options.sample_s)
    if served_s is not None:
        figures["recovery_s"] = max(0.0, served_s - options.low_s)
    figures["recovered"] = float(served_s is not None)
    figures["least_share_served_after_fall"] = min((row["share_served"] for row in after), default=1.0)
    figures["unavailable"] = loop.fleet.num_unavailable
    planned = planned_fleet(options, site)
    for service in SERVICES:
        figures[f"peak_{service}"] = max(loop.wanted[service])
        figures[f"held_{service}"] = held[-1][f"{service}s"]
        figures[f"settled_{service}"] = loop.wanted[service][-1]
        figures[f"reversals_{service}"] = num_reversals(loop.wanted[service])
        if planned is not None:
            figures[f"planned_{service}"] = getattr(planned, f"num_{service}s")
    for service in (TARGET, DRAFT):
        figures[f"hours_of_{service}s"] = loop.fleet.pod_s[service] / 3600
        if planned is not None:
            figures[f"hours_of_planned_{service}s"] = figures[f"planned_{service}"] * options.end_s / 3600
    return figures


def planned_fleet(options: Options, site: Deployed) -> PlannedFleet | None:
    """Returns the fleet, drafts apart, that `outrider plan` says for the most sessions; None where none gives the rate.

    A target has places for as many sessions as its settings say, or as its KV cache holds at the mean length.
    """
    turn_len = options.prompt_len + options.num_tokens
    mean_len = options.prompt_len + options.num_tokens / 2 + (options.turns - 1) / 2 * turn_len
    num_held = int(site.target.kv_budget_bytes / options.kv_token_bytes / mean_len)
    wanted = Wanted(
        num_sessions=options.high,
        rate=options.rate,
        max_sessions=max(1, min(site.target.max_sessions, num_held)),
        num_speculative_tokens=site.orchestrator.num_speculative_tokens,
    )
    return next((fleet for fleet in plan(options.measured, wanted) if fleet.kind == "apart"), None)


def served_since(rows: Sequence[Mapping[str, Any]], sample_s: float) -> float | None:
    """Returns the time since which enough sessions got the objective until the rows end; None where they did not."""
    kept = list(itertools.takewhile(lambda row: row["share_served"] >= _SHARE, reversed(rows)))
    return kept[-1]["time_s"] - sample_s if kept else None


def num_reversals(replicas: Iterable[int]) -> int:
    """Returns how often a number of replicas turned round beyond once: one rise and one fall are none."""
    changes = [after - before for before, after in itertools.pairwise(replicas) if after != before]
    num_turns = sum((before > 0) != (after > 0) for before, after in itertools.pairwise(changes))
    return max(0, num_turns - 1)


def plot(result: BenchResult, path: Path) -> None:
    """Draws sessions, replicas, and what sessions get, over time."""
    from bench.pictures import over_time

    def column(name: str) -> list[float]:
        return [math.nan if row[name] is None else row[name] for row in result.rows]

    rate, first_token = "tokens a second of a session", "seconds to the first token"
    panels = {
        "sessions": {"all": column("sessions"), "without a place": column("waiting")},
        "replicas that are ready": {f"{service}s": column(f"{service}s_ready") for service in SERVICES},
        rate: {"median": column("rate"), "slowest 5 %": column("rate_p5")},
        first_token: {"slowest 5 %": column("first_token_p95_s")},
    }
    objectives = {rate: result.config["rate"], first_token: result.config["first_token_s"]}
    over_time(path, [row["time_s"] / 60 for row in result.rows], panels, objectives, "minutes")
