"""Rates, budgets, and the order of the data."""

from itertools import islice
from pathlib import Path

import pytest

from outrider.errors import InvalidArgument
from outrider.training.corpus import from_conversations
from outrider.training.options import DistillOptions, MethodKind, parse_duration
from outrider.training.schedule import NUM_TIMED_STEPS, batches, is_deep, rate, steps_within


def test_the_rate_rises_then_falls() -> None:
    rates = [rate(step, 200, 1e-3) for step in range(200)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(1e-3) and 4 <= top <= 7
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(5e-5, rel=0.05)


def test_a_budget_holds_the_steps_that_fit() -> None:
    assert steps_within(60.0, 2.0, 2.0) == 30
    assert steps_within(60.0, 4.0, 2.0) == 22
    assert steps_within(-30.0, 2.0, 2.0) == 1


def test_deep_guesses_come_last() -> None:
    kinds = [is_deep(step, 100) for step in range(100)]
    planned = kinds[NUM_TIMED_STEPS:]
    assert planned == sorted(planned) and 15 < sum(planned) < 50
    # Before the plan exists, both kinds are timed.
    assert {is_deep(step, 0) for step in range(NUM_TIMED_STEPS)} == {True, False}
    assert kinds[:NUM_TIMED_STEPS] == [is_deep(step, 0) for step in range(NUM_TIMED_STEPS)]


def test_every_epoch_has_every_conversation_once() -> None:
    corpus = from_conversations([([1] * (3 + index % 17), 1, True) for index in range(100)])
    found: list[int] = []
    for group in batches(corpus, 64, seed=3):
        assert max(corpus.lens[group]) * len(group) <= 64
        found += group
        if len(found) >= 300:
            break
    for epoch in range(3):
        assert sorted(found[100 * epoch : 100 * (epoch + 1)]) == list(range(100))
    assert found[:100] != found[100:200]
    assert list(islice(batches(corpus, 64, seed=3), 5)) == list(islice(batches(corpus, 64, seed=3), 5))


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5400), (" 30m ", 1800)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-3m", "0", "3d", "1h30m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("field", ["depth", "tokens_per_batch", "draft_vocab_size", "held_out", "learning_rate"])
def test_wrong_options_are_named(field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=field):
        DistillOptions("embedded", tmp_path, **{field: 0})


def test_a_whole_model_is_not_trimmed(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="trim must be off"):
        DistillOptions("embedded", tmp_path, MethodKind.LAYERS, trim=True)
