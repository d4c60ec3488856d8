import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from draft_service.engine.commands import Reply
from draft_service.engine.sessions import Sessions
from outrider.constraint import Constraint
from outrider.errors import Fenced, InvalidArgument, KVCacheMiss, Overloaded, SessionNotFound
from outrider.grammar.compiler import GrammarCompiler, num_at_once
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer
from outrider.lm.tokenizer import TOKENIZER_NAME
from outrider.serving.stream_handle import StreamHandle
from outrider.tokens import TokenSpan
from tests.draft_service.conftest import terms


class _Stream:
    def post(self, replies: Sequence[Reply]) -> None:
        raise AssertionError("nothing is posted here")

    def end(self) -> None:
        raise AssertionError("nothing is ended here")


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def sessions(forgotten: list[str], clock: _Clock) -> Sessions:
    return Sessions(max_open=2, max_cached=3, idle_ttl_s=10, forget=forgotten.append, clock=clock)


def test_a_span_replaces_what_follows_its_start(sessions: Sessions) -> None:
    session = sessions.open(StreamHandle(_Stream(), 1), "s", 1, terms())
    assert session.apply(TokenSpan(0, (1, 2, 3, 4))) == 0
    assert session.apply(TokenSpan(4, (5,))) == 4
    assert session.apply(TokenSpan(1, (2, 3, 9))) == 3, "what a replay repeats is kept"
    assert list(session.token_ids) == [1, 2, 3, 9]
    assert session.apply(TokenSpan(0, (1, 2))) == 2
    assert list(session.token_ids) == [1, 2]
    with pytest.raises(KVCacheMiss) as miss:
        session.apply(TokenSpan(3, (4,)))
    assert miss.value.cached_len == 2


def test_the_grammar_of_a_request_that_has_ended_is_dropped(sessions: Sessions) -> None:
    compiler = GrammarCompiler(byte_tokenizer().files[TOKENIZER_NAME].decode(), VOCABULARY_SIZE, [EOS])
    hold = threading.Event()
    for _ in range(num_at_once()):
        compiler._threads.submit(lambda: hold.wait(20))
    grammars = [compiler.begin(Constraint(regex="a")) for _ in range(3)]
    first, second = StreamHandle(_Stream(), 1), StreamHandle(_Stream(), 2)
    session = sessions.open(first, "s", 1, replace(terms(), grammar=grammars[0]))
    sessions.open(second, "s", 2, replace(terms(), grammar=grammars[1]))
    assert session.terms.grammar is grammars[1]
    sessions.close(second)
    assert session.terms.grammar is None
    hold.set()
    assert grammars[2].matcher.forced()
    for grammar in grammars[:2]:
        with pytest.raises(InvalidArgument, match="cannot be compiled"):
            _ = grammar.matcher
    compiler.close()


def test_a_newer_lease_takes_the_session_over(sessions: Sessions) -> None:
    old, new = StreamHandle(_Stream(), 1), StreamHandle(_Stream(), 1)
    session = sessions.open(old, "s", 5, terms())
    assert sessions.open(new, "s", 6, terms()) is session
    with pytest.raises(Fenced):
        sessions.at(old, 5)
    with pytest.raises(Fenced):
        sessions.open(StreamHandle(_Stream(), 2), "s", 5, terms())
    assert sessions.close(old) is None, "the one who lost it frees only its handle"
    assert sessions.at(new, 6) is session
    assert sessions.close(new) is session


def test_the_same_lease_may_open_again(sessions: Sessions) -> None:
    old, new = StreamHandle(_Stream(), 1), StreamHandle(_Stream(), 1)
    sessions.open(old, "s", 5, terms())
    sessions.open(new, "s", 5, terms())
    with pytest.raises(Fenced):
        sessions.at(old, 5)
    assert sessions.at(new, 5).handle == new


def test_a_fencing_token_outlives_the_handle(sessions: Sessions) -> None:
    stream = _Stream()
    sessions.open(StreamHandle(stream, 1), "s", 5, terms())
    sessions.at(StreamHandle(stream, 1), 7)
    sessions.close(StreamHandle(stream, 1))
    with pytest.raises(Fenced):
        sessions.open(StreamHandle(stream, 2), "s", 6, terms())


def test_handles_are_bounded_and_used_once(sessions: Sessions) -> None:
    stream = _Stream()
    sessions.open(StreamHandle(stream, 1), "a", 1, terms())
    with pytest.raises(InvalidArgument):
        sessions.open(StreamHandle(stream, 1), "b", 1, terms())
    sessions.open(StreamHandle(stream, 2), "b", 1, terms())
    with pytest.raises(Overloaded):
        sessions.open(StreamHandle(stream, 3), "c", 1, terms())
    with pytest.raises(SessionNotFound):
        sessions.at(StreamHandle(stream, 3), 1)
    assert len(sessions.handles_of(stream)) == 2
    sessions.close(StreamHandle(stream, 1))
    sessions.open(StreamHandle(stream, 3), "c", 1, terms())


def test_idle_sessions_go_by_number_and_by_age(sessions: Sessions, forgotten: list[str], clock: _Clock) -> None:
    for name in "abcde":
        sessions.open(StreamHandle(_Stream(), 1), name, 1, terms())
        sessions.close(next(iter(sessions._handles)))
        clock.now_s += 1
    assert forgotten == ["a", "b"]
    assert sessions.next_expiry_s() == pytest.approx(7)
    clock.now_s += 7
    sessions.expire()
    assert forgotten == ["a", "b", "c"]
    assert sessions.num_known == 2
    clock.now_s += 10
    sessions.expire()
    assert sessions.num_known == 0
    assert sessions.next_expiry_s() is None
