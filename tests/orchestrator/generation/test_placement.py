"""Requests draft where a token takes less time, and find out when that changes."""

from orchestrator.generation.placement import Placement
from outrider.parameters import AT_SERVICE, AT_TARGET, DRAFT_PLACES


def run(placement: Placement, num: int, token_s: dict[str, float], address: str = "a") -> dict[str, int]:
    """Runs requests one after another; returns how many drafted at each place."""
    places = dict.fromkeys(DRAFT_PLACES, 0)
    for _ in range(num):
        place = placement.choose(address)
        places[place] += 1
        placement.observe(address, place, 100 * token_s[place], 100)
    return places


def test_both_places_are_tried_then_the_better_one_is_taken() -> None:
    placement = Placement()
    first = run(placement, 8, {AT_SERVICE: 0.02, AT_TARGET: 0.01})
    assert first == {AT_SERVICE: 4, AT_TARGET: 4}
    later = run(placement, 640, {AT_SERVICE: 0.02, AT_TARGET: 0.01})
    assert later == {AT_SERVICE: 10, AT_TARGET: 630}


def test_a_change_is_followed() -> None:
    placement = Placement()
    run(placement, 300, {AT_SERVICE: 0.02, AT_TARGET: 0.01})
    run(placement, 1000, {AT_SERVICE: 0.01, AT_TARGET: 0.02})
    assert run(placement, 128, {AT_SERVICE: 0.01, AT_TARGET: 0.02})[AT_SERVICE] >= 126


def test_each_target_has_its_own_answer() -> None:
    placement = Placement()
    run(placement, 20, {AT_SERVICE: 0.02, AT_TARGET: 0.01}, "a")
    run(placement, 20, {AT_SERVICE: 0.01, AT_TARGET: 0.02}, "b")
    assert placement.choose("a") == AT_TARGET and placement.choose("b") == AT_SERVICE


def test_requests_that_run_beside_each_other_are_spread_before_any_has_ended() -> None:
    placement = Placement()
    assert sorted(placement.choose("a") for _ in range(6)) == [AT_SERVICE] * 3 + [AT_TARGET] * 3


def test_a_short_answer_shows_nothing() -> None:
    placement = Placement()
    run(placement, 8, {AT_SERVICE: 0.02, AT_TARGET: 0.01})
    placement.observe("a", AT_TARGET, 10.0, 3)
    assert placement.choose("a") == AT_TARGET
