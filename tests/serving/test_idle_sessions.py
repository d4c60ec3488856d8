import pytest

from outrider.serving.idle_sessions import IdleSessions


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_sessions_go_by_age_and_by_number() -> None:
    clock = _Clock()
    idle: IdleSessions[int] = IdleSessions(10.0, clock)
    assert idle.next_expiry_s() is None
    for number, name in enumerate("abcde"):
        idle.add(name, number)
        clock.now_s += 1
    assert idle.expire(max_kept=5) == []
    assert idle.expire(max_kept=3) == ["a", "b"]
    assert idle.next_expiry_s() == pytest.approx(7)
    clock.now_s += 7
    assert idle.expire(max_kept=3) == ["c"]
    assert (idle.get("c"), idle.get("d"), len(idle)) == (None, 3, 2)
    assert idle.expire(max_kept=-1) == ["d", "e"]
    assert idle.next_expiry_s() is None


def test_use_makes_a_session_young_again() -> None:
    clock = _Clock()
    idle: IdleSessions[str] = IdleSessions(10.0, clock)
    for name in ("one", "other"):
        idle.add(name, name)
    clock.now_s += 6
    assert idle.pop("one") == "one"
    assert idle.pop("one") is None
    idle.add("one", "one")
    clock.now_s += 6
    assert idle.expire(max_kept=9) == ["other"]
    assert idle.next_expiry_s() == pytest.approx(4)
