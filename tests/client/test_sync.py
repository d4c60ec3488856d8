import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from outrider.client import Accepted, Client, ClientClosed, Delta, GenerationRequest, RetryPolicy
from outrider.errors import InvalidArgument, SessionNotFound, Unavailable
from outrider.parameters import SamplingParameters
from tests.client.scripted import HANG, WORDS, ScriptedService, accepted, delta


@pytest.fixture
def client(service: ScriptedService) -> Iterator[Client]:
    with Client(service.address) as sync:
        yield sync


def test_it_generates(client: Client) -> None:
    events = list(client.generate(GenerationRequest(text="Hello")))
    assert isinstance(events[0], Accepted)
    assert client.complete(GenerationRequest(text="Hello")).text == "".join(WORDS)


def test_it_manages_sessions(client: Client, service: ScriptedService) -> None:
    assert client.get_session("s").committed_len == 13
    with pytest.raises(SessionNotFound):
        client.get_session("other")
    client.delete_session("s")
    assert service.deleted == ["s"]
    assert client.cancel("s")
    assert len(client.list_models().workers) == 2


def test_leaving_the_loop_stops_the_generation(client: Client, service: ScriptedService) -> None:
    service.scripts = [[accepted(), delta(0), HANG]]
    for event in client.generate(GenerationRequest(text="Hello")):
        if isinstance(event, Delta):
            break
    assert service.requests


def test_a_conversation_blocks(client: Client, service: ScriptedService) -> None:
    chat = client.conversation(system="Be brief.")
    assert chat.ask("Hi").text == "".join(WORDS)
    assert "".join(event.text for event in chat.send("And?") if isinstance(event, Delta)) == "".join(WORDS)
    first = chat.session_id
    assert service.requests[-1].request_id == chat.request_id
    chat.reset()
    assert chat.ask("Anew", timeout_s=5).text == "".join(WORDS)
    contents = [[message.content for message in asked.chat.messages] for asked in service.requests]
    assert contents == [["Be brief.", "Hi"], ["And?"], ["Be brief.", "Anew"]]
    assert (service.deleted, service.requests[-1].session_id) == ([first], chat.session_id)


def test_prompts_are_plain_values(client: Client, service: ScriptedService) -> None:
    assert list(client.generate("Hello", SamplingParameters(max_tokens=20)))
    client.complete([{"role": "user", "content": "Hi"}], session_id="mine")
    with pytest.raises(InvalidArgument, match="content"):
        client.generate([{"role": "user"}])
    text, chat = service.requests
    assert (text.text, text.parameters.max_tokens, chat.session_id) == ("Hello", 20, "mine")


def test_a_closed_client_says_so(service: ScriptedService) -> None:
    service.scripts = [[accepted(), delta(0), HANG]]
    client = Client(service.address)
    events, chat = client.generate("Hello"), client.conversation()
    next(events)
    client.close()
    for call in (lambda: next(events), lambda: client.complete("Hello"), client.list_models, lambda: chat.ask("Hi")):
        with pytest.raises(ClientClosed, match="the client is closed"):
            call()
    with pytest.raises(ClientClosed):
        list(client.generate("Hello"))


def test_closing_ends_what_runs_in_other_threads(service: ScriptedService) -> None:
    service.scripts = [[accepted(), delta(0), HANG]]
    client = Client(service.address)
    reached, errors = threading.Event(), list[Exception]()

    def consume() -> None:
        try:
            for event in client.generate("Hello"):
                if isinstance(event, Delta):
                    reached.set()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    assert reached.wait(10)
    client.close()
    thread.join(10)
    assert [type(error) for error in errors] == [ClientClosed]


def test_an_interrupt_ends_the_generation_and_the_client(service: ScriptedService) -> None:
    service.scripts = [[accepted(), delta(0), HANG]]
    program = """
import faulthandler, sys
from outrider import Client
faulthandler.dump_traceback_later(15)
with Client(sys.argv[1]) as client:
    for event in client.generate("Hello"):
        print(type(event).__name__, flush=True)
"""
    command = [sys.executable, "-X", "dev", "-c", program, service.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["Accepted\n", "Delta\n"]
        process.send_signal(signal.SIGINT)
        try:
            _, error = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            # With what it wrote: where its threads stood.
            process.kill()
            pytest.fail(process.communicate()[1])
    assert error.strip().endswith("KeyboardInterrupt"), error
    assert error.count("Traceback") == 1 and "Warning" not in error, error


def test_closing_ends_its_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    client = Client("127.0.0.1:1", retry=RetryPolicy(max_attempts=1))
    with pytest.raises(Unavailable):
        client.complete(GenerationRequest(text="Hello"))
    client.close()
    client.close()
    assert threading.active_count() == before
