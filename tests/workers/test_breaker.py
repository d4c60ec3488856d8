from outrider.workers.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_that_never_failed_is_used_by_all() -> None:
    breaker = Breaker(1.0, Clock())
    for _ in range(3):
        assert breaker.permits
        breaker.enter()


def test_a_failure_opens_and_one_session_tries() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock)
    breaker.fail()
    assert breaker.is_open
    assert not breaker.permits
    clock.now += 1.0
    assert breaker.permits
    breaker.enter()
    assert not breaker.is_open
    assert not breaker.permits
    breaker.succeed()
    assert breaker.permits
    breaker.enter()
    assert breaker.permits


def test_a_trial_without_an_outcome_does_not_block_others_for_ever() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock)
    breaker.fail()
    clock.now += 1.0
    breaker.enter()
    assert not breaker.permits
    clock.now += 1.0
    assert breaker.permits


def test_open_times_double_up_to_a_limit_and_restart_after_a_success() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock)
    open_times = []
    for _ in range(7):
        breaker.fail()
        began = clock.now
        while breaker.is_open:
            clock.now += 0.5
        open_times.append(clock.now - began)
    assert open_times == [1, 2, 4, 8, 16, 16, 16]
    breaker.succeed()
    breaker.fail()
    clock.now += 1.0
    assert not breaker.is_open


def test_all_sessions_of_one_broken_stream_are_one_failure() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock)
    for _ in range(50):
        breaker.fail()
    clock.now += 1.0
    assert not breaker.is_open
