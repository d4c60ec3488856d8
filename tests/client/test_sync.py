import threading
from collections.abc import Iterator

import pytest

from outrider.client import Accepted, Delta, GenerationRequest, RetryPolicy, SyncClient
from outrider.errors import SessionNotFound, Unavailable
from tests.client.scripted import HANG, WORDS, ScriptedService, accepted, delta


@pytest.fixture
def client(service: ScriptedService) -> Iterator[SyncClient]:
    with SyncClient(service.address) as sync:
        yield sync


def test_it_generates(client: SyncClient) -> None:
    events = list(client.generate(GenerationRequest(text="Hello")))
    assert isinstance(events[0], Accepted)
    assert client.complete(GenerationRequest(text="Hello")).text == "".join(WORDS)


def test_it_manages_sessions(client: SyncClient, service: ScriptedService) -> None:
    assert client.get_session("s").committed_len == 13
    with pytest.raises(SessionNotFound):
        client.get_session("other")
    client.delete_session("s")
    assert service.deleted == ["s"]
    assert client.cancel("s")
    assert len(client.list_models().workers) == 2


def test_leaving_the_loop_stops_the_generation(client: SyncClient, service: ScriptedService) -> None:
    service.scripts = [[accepted(), delta(0), HANG]]
    for event in client.generate(GenerationRequest(text="Hello")):
        if isinstance(event, Delta):
            break
    assert service.requests


def test_closing_ends_its_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    client = SyncClient("127.0.0.1:1", retry=RetryPolicy(max_attempts=1))
    with pytest.raises(Unavailable):
        client.complete(GenerationRequest(text="Hello"))
    client.close()
    client.close()
    assert threading.active_count() == before
