"""When a model drafts beside what was found in texts."""

from outrider.drafters.combined_worth import RoundTimes, Yields, expected_of


def times(steps_s: float, rest_s: float) -> RoundTimes:
    found = RoundTimes()
    for _ in range(8):
        found.steps_s.observe(steps_s)
        found.rest_s.observe(rest_s)
    return found


def test_while_nothing_is_known_the_model_drafts() -> None:
    assert Yields().model_pays(100.0, 1.0, RoundTimes())


def test_it_drafts_where_its_tokens_are_worth_its_time() -> None:
    yields = Yields()
    for _ in range(50):
        yields.observe_model(2)
    # Nothing was found: 1 + 2 tokens in 30 ms, or 1 in 20.
    assert yields.model_pays(0.0, 0.0, times(0.01, 0.02))
    # 5 are expected, the first almost surely: the model would add to the rest of cases alone.
    assert not yields.model_pays(5.0, 0.95, times(0.01, 0.02))
    # Its time is almost nothing.
    assert yields.model_pays(5.0, 0.95, times(0.0001, 0.02))
    # Nor does a model draft that is always wrong.
    for _ in range(100):
        yields.observe_model(0)
    assert not yields.model_pays(0.0, 0.0, times(0.01, 0.02))


def test_what_was_found_counts_by_how_much_of_it_came_true() -> None:
    yields = Yields()
    for _ in range(50):
        yields.observe_model(2)
        yields.observe_found(0, 5.0)
    assert yields.model_pays(5.0, 0.95, times(0.01, 0.02))
    for _ in range(50):
        yields.observe_found(5, 5.0)
        yields.observe_found(0, 0.0)
    assert not yields.model_pays(5.0, 0.95, times(0.01, 0.02))


def test_sessions_begin_with_what_others_have_learnt() -> None:
    common = Yields()
    for _ in range(400):
        Yields(common).observe_model(3)
    assert Yields(common).means[1] > 2.5
    assert common.means[0] == 1.0


def test_the_expected_tokens_of_a_tree() -> None:
    assert expected_of([], []) == (0, 0)
    total, first = expected_of([0, 1, 0], [0.5, 0.25, 0.25])
    assert (total, first) == (1.0, 0.75)
