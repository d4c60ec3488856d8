"""The autoscalers in a closed loop, and the simulation that closes it."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from bench import autoscale, registry
from bench.deployed import DRAFT, SERVICES, TARGET, deployed
from bench.scrapes import Scrapes
from bench.simulated_fleet import Fleet, Work
from bench.simulated_pods import DraftPod
from bench.simulated_rounds import Round, RoundLimits, RoundLoad, best_round
from outrider.errors import InvalidArgument
from outrider.planning import Measurements, Wanted, plan

K8S = Path(__file__).parents[2] / "k8s"
MEASURED = Measurements(pass_s=0.004, row_s=2e-4, draft_step_s=5e-4, draft_row_s=5e-5, acceptance=0.8, hit_rate=0.7)
LIMITS = RoundLimits(max_line=5, max_pass_rows=1024, max_slowdown=1.3)
WORK = Work(prompt_len=64, num_tokens=64, turns=2, first_token_s=2.0, kv_token_bytes=32768, seed=0)
STARTS = {"target": 20.0, "draft": 10.0, "orchestrator": 5.0}


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields a copy of the manifests with targets of few places, so that few sessions need several."""
    folder = tmp_path_factory.mktemp("deployed") / "k8s"
    shutil.copytree(K8S, folder)
    with (folder / "base" / "config" / "target.env").open("a") as settings:
        settings.write("OUTRIDER_MAX_SESSIONS=32\n")
    yield str(folder)


def load(
    num: int, step_s: float = 1e-3, num_drafted: int | None = None, prompts: tuple[int, float] = (0, 0.0)
) -> RoundLoad:
    drafted = num if num_drafted is None else num_drafted
    return RoundLoad(num, drafted, step_s, MEASURED.hit_rate, *prompts)


def found(given: RoundLoad) -> Round:
    rounds = best_round(MEASURED, LIMITS, given)
    assert rounds is not None
    return rounds


@pytest.mark.parametrize("num", [1, 2, 9, 64, 200])
def test_rounds_are_those_of_the_plan(num: int) -> None:
    wanted = Wanted(num, rate=0.01, max_sessions=num, num_speculative_tokens=LIMITS.max_line)
    fleet = next(fleet for fleet in plan(MEASURED, wanted) if fleet.kind == "apart")
    assert fleet.num_targets == fleet.num_drafts == 1
    rounds = found(load(num, MEASURED.draft_step_s + num * MEASURED.draft_row_s))
    # The plan knows no fleet of drafts that are of no use; where they are none, a round is a plain one.
    plain = 1 / found(load(num, num_drafted=0)).round_s
    assert rounds.num_tokens / rounds.round_s == pytest.approx(max(fleet.rate, plain))


def test_a_slow_draft_is_not_waited_for() -> None:
    assert found(load(8)).line > 0
    assert found(load(8, step_s=1.0)).line == 0
    assert found(load(8, num_drafted=0)).line == 0


def test_prompts_stretch_passes_as_far_as_they_may() -> None:
    alone, beside = found(load(64)), found(load(64, prompts=(1, 400.0)))
    assert beside.pass_s == pytest.approx(LIMITS.max_slowdown * alone.pass_s)
    assert alone.round_s == alone.quiet_round_s == beside.quiet_round_s < beside.round_s
    assert found(load(64, prompts=(1, 1.0))).prompt_rows == 1
    assert found(load(0, prompts=(9, 5000.0))).prompt_rows == LIMITS.max_pass_rows
    assert best_round(MEASURED, LIMITS, load(0)) is None


def told(num: int, measured: Measurements = MEASURED, line: int = 3, round_s: float = 0.05) -> dict[str, float]:
    """Returns what a draft's metrics say after two minutes with sessions that ask alike."""
    now = 0.0
    pod = DraftPod("draft-1", 0.0, deployed(), measured, lambda: now)
    samples: dict[str, float] = {}
    for second in range(121):
        now = float(second)
        for _ in range(num):
            pod.ask(round_s, round_s, line)
        pod.run(1.0)
        if second % 15 == 0:
            samples = {sample.name: sample.value for family in pod.registry.collect() for sample in family.samples}
    return samples


def test_drafts_tell_what_sessions_cost_each_other() -> None:
    ratios = [told(num)["outrider_draft_shared_ratio"] for num in (0, 1, 8, 32, 256)]
    assert ratios[:2] == [0, 0]
    assert ratios == sorted(ratios)
    # All of the time, each step of all: what one alone would need is a small part.
    assert ratios[4] == pytest.approx(1 - 0.00055 / (0.0005 + 256 * 0.00005), abs=0.01)
    # Each asks twenty times a second.
    assert told(8)["outrider_draft_proposals_total"] == pytest.approx(121 * 8 * 20, abs=1)


def test_proposals_are_late_only_where_a_step_is_longer_than_targets_wait() -> None:
    assert told(256)["outrider_draft_late_ratio"] == 0
    slow = Measurements(pass_s=0.1, row_s=0.001, draft_step_s=0.05, draft_row_s=0.01, acceptance=0.8)
    # Two steps take 0.24 s, and the target goes on after 0.1 s of waiting and 0.05 s of its pass.
    assert told(7, slow)["outrider_draft_late_ratio"] == pytest.approx((0.24 - 0.15) / 0.12, abs=0.02)
    # One alone has nobody to blame.
    assert told(1, slow)["outrider_draft_late_ratio"] == 0


def test_values_are_averages_of_what_was_scraped() -> None:
    now, metrics = 0.0, CollectorRegistry()
    gauge = Gauge("seen", "One that is asked for.", registry=metrics)
    Gauge("unseen", "Another.", registry=metrics).set(1)
    scrapes = Scrapes(["seen"], 15.0, 60.0, lambda: now)
    assert scrapes.values("pod") == {}
    scrapes.add("pod", metrics, 0.2)
    values = []
    for second in range(91):
        now = float(second)
        gauge.set(second)
        scrapes.run()
        if second % 15 == 0:
            values.append(scrapes.values("pod").get("seen"))
    # Scraped at 3, 18, 33, ...; four of them make a minute.
    assert values == [None, 3000, 10500, 18000, 25500, 40500, 55500]
    scrapes.remove("pod")
    assert scrapes.values("pod") == {}


def fleet(manifests: str, num: int) -> Fleet:
    made = Fleet(deployed(manifests), MEASURED, WORK, STARTS)
    made.num_wanted = num
    return made


def run(simulated: Fleet, seconds: float) -> None:
    for _ in range(math.ceil(seconds / 0.5)):
        simulated.run(0.5)


def test_who_finds_no_place_waits_until_there_is_one(manifests: str) -> None:
    simulated = fleet(manifests, 50)
    run(simulated, 1)
    # Nobody ends, and makes a place for another.
    for client in simulated.clients:
        client.remaining += 100_000
    run(simulated, 29)
    assert [len(pod.sessions) for pod in simulated.pods(TARGET)] == [32]
    assert sum(client.target is None for client in simulated.clients) == 18
    # After 15 s without a place they fail, and ask again.
    assert simulated.num_unavailable == 18
    simulated.scale(TARGET, 2)
    run(simulated, 19)
    assert [pod.is_in_rotation for pod in simulated.pods(TARGET)] == [True, False]
    run(simulated, 10)
    assert sorted(len(pod.sessions) for pod in simulated.pods(TARGET)) == [18, 32]


def test_a_pod_that_goes_loses_no_session(manifests: str) -> None:
    simulated = fleet(manifests, 40)
    for service in (TARGET, DRAFT):
        simulated.scale(service, 3)
    run(simulated, 60)
    # Long outputs, so that sessions must be handed over.
    for client in simulated.clients:
        client.remaining += 10_000
    for service in (TARGET, DRAFT):
        simulated.scale(service, 2)
    going = [pod for pod in simulated.pods(TARGET) if pod.hand_over_s is not None]
    assert [pod.name for pod in going] == [simulated.pods(TARGET)[-1].name], "the newest"
    held = list(going[0].sessions)
    run(simulated, 5)
    assert held == list(going[0].sessions), "for half of its drain budget they go on"
    run(simulated, 65)
    assert len(simulated.pods(TARGET)) == len(simulated.pods(DRAFT)) == 2
    assert len(simulated.clients) == 40
    assert all(client.target in simulated.pods(TARGET) for client in simulated.clients)
    assert all(client.draft in simulated.pods(DRAFT) for client in simulated.clients)


def test_what_does_not_fit_the_kv_cache_waits(manifests: str) -> None:
    work = Work(prompt_len=512, num_tokens=4096, turns=1, first_token_s=2.0, kv_token_bytes=1 << 17, seed=0)
    simulated = Fleet(deployed(manifests), MEASURED, work, STARTS)
    simulated.num_wanted = 32
    run(simulated, 60)
    (pod,) = simulated.pods(TARGET)
    samples = {sample.name: sample.value for family in pod.registry.collect() for sample in family.samples}
    assert samples["outrider_target_session_usage_ratio"] == 1
    # 4 GiB are 32,768 tokens, and by then there are more; those that give way are to be run again, all of them.
    lengths = [client.context for client in simulated.clients]
    assert sum(lengths) > 1.2 * 32768
    assert 0.8 < samples["outrider_kv_cache_usage_ratio"] <= 1
    assert samples["outrider_target_preemptions_total"] > 0
    assert samples["outrider_target_queued_tokens"] == pytest.approx(sum(lengths) - 32768, rel=0.3)
    assert 0 < samples["outrider_target_sessions_waiting"] < 32


OPTIONS = {
    "low": 4,
    "high": 100,
    "low_s": 60.0,
    "ramp_s": 0.0,
    "hold_s": 600.0,
    "fall_s": 1500.0,
    "num_tokens": 128,
    "target_start_s": 30.0,
    "draft_start_s": 20.0,
    "step_s": 1.0,
}


async def test_the_loop_follows_the_load(manifests: str, tmp_path: Path) -> None:
    options = autoscale.Options(**OPTIONS, manifests=manifests)
    result = await autoscale.measure(options)
    figures = result.figures
    assert [row["time_s"] for row in result.rows] == pytest.approx([15.0 * (number + 1) for number in range(144)])
    # A hundred sessions of 32 places a target, to 70 %: more than three, and no more than all that fit them.
    assert 4 <= figures["held_target"] <= figures["peak_target"] <= 6
    assert figures["settled_target"] == figures["settled_draft"] == 1
    assert figures["settled_orchestrator"] == 2
    assert figures["reversals_target"] == figures["reversals_orchestrator"] == 0
    assert figures["recovered"] == 1
    # No target is there before it has started, and its first value comes with its first scrape.
    assert 30 < figures["recovery_s"] < 600
    assert result.rows[3]["share_served"] == 1, "few sessions get what they should"
    assert min(row["share_served"] for row in result.rows[4:10]) < 0.5, "the rise is felt"
    assert figures["hours_of_targets"] < figures["peak_target"] * options.end_s / 3600
    again = await autoscale.measure(options)
    assert again.rows == result.rows, "it is deterministic"
    autoscale.plot(result, tmp_path / "autoscale.png")
    assert (tmp_path / "autoscale.png").stat().st_size > 1000


async def test_a_window_that_is_too_short_flaps(manifests: str, tmp_path: Path) -> None:
    # The same, but scaled in as soon as the load allows it, with thresholds that new pods undercut: it must be noticed.
    folder = tmp_path / "k8s"
    shutil.copytree(manifests, folder)
    path = folder / "base" / "draft.yaml"
    text = path.read_text()
    changed = text.replace("stabilizationWindowSeconds: 300", "stabilizationWindowSeconds: 0").replace(
        'averageValue: "400m"', 'averageValue: "10m"'
    )
    assert changed != text
    path.write_text(changed)
    result = await autoscale.measure(autoscale.Options(**OPTIONS, manifests=str(folder)))
    assert result.figures["reversals_draft"] > 0


def test_reversals() -> None:
    assert autoscale.num_reversals([1, 1, 2, 4, 4, 3, 1]) == 0
    assert autoscale.num_reversals([1, 2, 1, 2, 1]) == 2
    assert autoscale.num_reversals([2, 2, 2]) == 0


def test_the_objective_is_met_since_it_was_kept() -> None:
    shares = [1.0, 0.2, 0.96, 0.94, 0.95, 1.0]
    rows = [{"time_s": 15.0 * (number + 1), "share_served": share} for number, share in enumerate(shares)]
    assert autoscale.served_since(rows, 15.0) == 60.0
    assert autoscale.served_since(rows[:2], 15.0) is None


def test_sessions_over_time() -> None:
    options = autoscale.Options(low=10, high=110, low_s=100, ramp_s=20, hold_s=50, fall_s=10)
    assert [options.sessions(now) for now in (0, 99, 100, 105, 120, 149, 150, 160)] == [
        10, 10, 10, 35, 110, 110, 10, 10
    ]  # fmt: skip


def test_all_services_are_planned(manifests: str) -> None:
    planned = autoscale.planned_fleet(autoscale.Options(), deployed(manifests))
    assert planned is not None
    assert planned.sessions_per_target <= 32
    assert all(getattr(planned, f"num_{service}s") > 0 for service in SERVICES)


@pytest.mark.parametrize(
    ("name", "value"), [("high", "0"), ("speed", "0"), ("sample_s", "0.1"), ("manifests", "/nowhere")]
)
def test_wrong_options_are_named(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=name if name != "manifests" else "folder k8s"):
        registry.run("autoscale", arguments={name: value})
