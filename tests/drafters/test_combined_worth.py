"""When a model drafts beside what was found in texts."""

from outrider.drafters.combined_worth import Found, RoundTimes, Yields


def times(steps_s: float, rest_s: float) -> RoundTimes:
    found = RoundTimes()
    for _ in range(8):
        found.steps_s.observe(steps_s)
        found.rest_s.observe(rest_s)
    return found


def test_while_nothing_is_known_the_model_drafts() -> None:
    assert Yields().model_pays(Found(100.0, 1.0), RoundTimes())


def test_it_drafts_where_its_tokens_are_worth_its_time() -> None:
    yields = Yields()
    for _ in range(50):
        yields.observe_model(2)
    # 0.1 were found: 1 + 2 tokens in 30 ms, or about 1 in 20.
    assert yields.model_pays(Found(0.1, 0.1), times(0.01, 0.02))
    # 5 are expected, the first almost surely: the model would add to the rest of cases alone.
    assert not yields.model_pays(Found(5.0, 0.95), times(0.01, 0.02))
    # Its time is almost nothing.
    assert yields.model_pays(Found(5.0, 0.95), times(0.0001, 0.02))
    # Nor does a model draft that is always wrong.
    for _ in range(100):
        yields.observe_model(0)
    assert not yields.model_pays(Found(0.1, 0.1), times(0.01, 0.02))
    # Where nothing was found, somebody else decides whether to wait for it.
    assert yields.model_pays(Found(0.0, 0.0), times(0.01, 0.02))


def test_now_and_then_it_drafts_all_the_same() -> None:
    yields, seconds = Yields(), times(0.1, 0.01)
    assert sum(yields.model_pays(Found(5.0, 0.95), seconds) for _ in range(160)) == 10


def test_what_was_found_counts_by_how_much_of_it_was_accepted() -> None:
    yields = Yields()
    for _ in range(50):
        yields.observe_model(2)
        yields.observe_found(Found(5.0, 0.95), 0)
    assert yields.model_pays(Found(5.0, 0.95), times(0.01, 0.02))
    for _ in range(50):
        yields.observe_found(Found(5.0, 0.95), 5)
        yields.observe_found(Found(), 0)
    assert not yields.model_pays(Found(5.0, 0.95), times(0.01, 0.02))


def test_sessions_begin_with_what_others_have_learnt() -> None:
    common = Yields()
    for _ in range(400):
        Yields(common).observe_model(3)
    assert Yields(common).of_model > 2.5
    assert set(common.ratios) == {1.0}


def test_short_matches_and_long_ones_are_told_apart() -> None:
    yields = Yields()
    for _ in range(50):
        yields.observe_model(1)
        yields.observe_found(Found(0.3, 0.3), 0)
        yields.observe_found(Found(4.0, 0.9), 6)
    assert yields.model_pays(Found(0.4, 0.4), times(0.005, 0.02))
    assert not yields.model_pays(Found(4.0, 0.9), times(0.005, 0.02))


def test_what_was_found_is_worth_its_nodes() -> None:
    assert Found.of([], []) == Found(0, 0)
    assert Found.of([0, 1, 0], [0.5, 0.25, 0.25]) == Found(1.0, 0.75)
    assert [Found(1.0, first).kind for first in (0.0, 0.3, 0.6, 1.0)] == [0, 1, 2, 3]
