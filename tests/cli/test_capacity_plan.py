"""The arithmetic of fleets, against what was measured, and what must hold of any."""

import dataclasses
import random

import pytest

from outrider.cli.capacity_plan import Fleet, Measurements, Wanted, best_rate, plan, tokens_per_round
from outrider.errors import InvalidArgument

CAPACITY = Measurements(
    pass_s=0.08, row_s=0.001, draft_step_s=0.012, draft_row_s=0.0002, acceptance=0.8, hit_rate=0.7, rest_s=0.0037
)
"""The models of `outrider bench capacity`; the rest is what made its colocated target come to 15.9 sessions."""


def fleets(measured: Measurements, wanted: Wanted) -> dict[str, Fleet]:
    return {fleet.kind: fleet for fleet in plan(measured, wanted)}


def test_tokens_of_a_round() -> None:
    assert tokens_per_round(0.0, 5) == 1
    assert tokens_per_round(0.5, 2) == 1.75
    assert tokens_per_round(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_it_says_what_was_measured() -> None:
    # Drafts cost next to nothing, so that there are as many as are of use, as there.
    wanted = Wanted(num_sessions=1000, rate=12.0, max_sessions=64, num_speculative_tokens=4, draft_cost=0.01)
    found = fleets(CAPACITY, wanted)
    assert found["colocated"].sessions_per_target == pytest.approx(15.9, rel=0.2)
    assert found["separate"].sessions_per_target == pytest.approx(25.8, rel=0.2)
    gain = found["separate"].sessions_per_target / found["colocated"].sessions_per_target
    assert gain == pytest.approx(1.63, rel=0.2)


def test_every_fleet_does_what_is_wanted() -> None:
    rng = random.Random(1)
    kinds = set()
    for _ in range(300):
        measured = Measurements(
            pass_s=rng.uniform(0.005, 0.1),
            row_s=rng.uniform(0, 0.001),
            draft_step_s=rng.uniform(0.001, 0.02),
            draft_row_s=rng.uniform(0, 0.0003),
            acceptance=rng.uniform(0, 0.95),
            rtt_s=rng.uniform(0, 0.05),
            hit_rate=rng.choice([0.0, 0.5, 0.9]),
            rest_s=rng.uniform(0, 0.002),
        )
        wanted = Wanted(rng.randint(1, 2000), rng.uniform(1, 60), max_sessions=rng.randint(1, 256))
        most = best_rate(measured, wanted)
        for fleet in plan(measured, wanted):
            kinds.add(fleet.kind)
            assert wanted.rate <= fleet.rate <= most * (1 + 1e-9)
            assert fleet.num_targets * wanted.max_sessions >= wanted.num_sessions
            assert fleet.sessions_per_target * fleet.num_targets >= wanted.num_sessions
            assert (fleet.num_drafts > 0) == (fleet.kind == "separate")
            assert fleet.num_orchestrators >= wanted.num_sessions / wanted.sessions_per_orchestrator
            assert fleet.cost == pytest.approx(fleet.num_targets + wanted.draft_cost * fleet.num_drafts)
    assert kinds == {"plain", "colocated", "separate"}


def test_drafts_that_are_never_right_are_not_worth_it() -> None:
    measured = dataclasses.replace(CAPACITY, acceptance=0.0)
    found = plan(measured, Wanted(100, 5.0))
    assert min(found, key=lambda fleet: fleet.cost).kind == "plain"


def test_more_sessions_take_more_of_everything() -> None:
    few = fleets(CAPACITY, Wanted(100, 12.0))["separate"]
    many = fleets(CAPACITY, Wanted(1000, 12.0))["separate"]
    assert many.num_targets >= 9 * few.num_targets
    assert many.num_drafts >= 5 * few.num_drafts
    assert many.num_orchestrators == 7


def test_a_longer_way_needs_no_less() -> None:
    near = fleets(dataclasses.replace(CAPACITY, rtt_s=0.0, hit_rate=0.0), Wanted(200, 14.0))["separate"]
    far = fleets(dataclasses.replace(CAPACITY, rtt_s=0.05, hit_rate=0.0), Wanted(200, 14.0))["separate"]
    ahead = fleets(dataclasses.replace(CAPACITY, rtt_s=0.05, hit_rate=0.9), Wanted(200, 14.0))["separate"]
    assert far.cost >= near.cost
    assert ahead.cost <= far.cost


def test_what_no_fleet_can_do_gives_none() -> None:
    wanted = Wanted(10, 1000.0)
    assert plan(CAPACITY, wanted) == []
    assert best_rate(CAPACITY, wanted) < 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("pass_s", 0.0), ("row_s", -1.0), ("draft_step_s", -1.0), ("acceptance", 1.0), ("hit_rate", 1.5), ("rtt_s", -1.0)],
)
def test_wrong_measurements_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        dataclasses.replace(CAPACITY, **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"), [("num_sessions", 0), ("rate", 0.0), ("num_speculative_tokens", 65), ("draft_cost", -1.0)]
)
def test_wrong_wishes_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Wanted(**{"num_sessions": 1, "rate": 1.0, field: value})
    assert caught.value.field == field
