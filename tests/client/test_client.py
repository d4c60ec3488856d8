import asyncio
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from outrider.client import (
    Accepted,
    AsyncClient,
    Client,
    ClientClosed,
    Conversation,
    Delta,
    Finished,
    GenerationRequest,
    Message,
    OutriderClient,
    RetryPolicy,
    Speculation,
)
from outrider.client.prompt import Prompt
from outrider.errors import (
    DataLoss,
    DeadlineExceeded,
    Draining,
    Fenced,
    InvalidArgument,
    OutriderError,
    Overloaded,
    RequestNotFound,
    SessionBusy,
    SessionNotFound,
    Unavailable,
)
from outrider.parameters import FinishReason, SamplingParameters
from outrider.tokens import TokenOrigin
from outrider.v1 import tokens_pb2
from tests.client.scripted import HANG, WORDS, ScriptedService, accepted, delta, finished, serving, whole

TEXT = "".join(WORDS)
BROKEN = ConnectionError("connection reset")
QUICK = RetryPolicy(max_attempts=4, initial_backoff_s=0.01, max_backoff_s=0.02)


def request(**values: object) -> GenerationRequest:
    return GenerationRequest(text="Hello", **values)  # type: ignore[arg-type]


async def run(*services: ScriptedService, **values: object) -> list[object]:
    async with serving(*services) as addresses, OutriderClient(addresses, retry=QUICK) as client:
        return [event async for event in client.generate(request(**values))]


async def test_events_arrive_in_order_and_typed() -> None:
    events = await run(ScriptedService())
    assert events[0] == Accepted("r", "s", 7, 3, 0)
    assert events[1] == Delta(0, (0, 1), "The cat", (TokenOrigin.ACCEPTED, TokenOrigin.BONUS), ())
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.finish_reason is FinishReason.LENGTH
    assert (end.statistics.acceptance_rate, end.statistics.mean_acceptance_length) == (0.75, 2.5)


async def test_the_request_carries_its_prediction() -> None:
    service = ScriptedService()
    await run(service, prediction="as before")
    await run(service, prediction=[3, 1, 4])
    await run(service)
    text, token_ids, none = service.requests
    assert text.predicted_text == "as before"
    assert list(token_ids.predicted_token_ids.token_ids) == [3, 1, 4]
    assert none.WhichOneof("prediction") is None


async def test_the_request_carries_everything() -> None:
    service = ScriptedService()
    parameters = SamplingParameters(temperature=0.5, logit_bias={3: -1.0}, stop=("x",), seed=9)
    await run(service, parameters=parameters, session_id="mine", request_id="once")
    asked = service.requests[0]
    assert (asked.text, asked.session_id, asked.request_id) == ("Hello", "mine", "once")
    assert asked.parameters.temperature == 0.5
    assert (dict(asked.parameters.logit_bias), list(asked.parameters.stop)) == ({3: -1.0}, ["x"])
    assert not asked.HasField("resume_offset")
    given = {item.name for item, _ in asked.parameters.ListFields()}
    assert given == {"temperature", "logit_bias", "stop", "seed"}, "the service has defaults of its own"


def test_an_empty_request_id_is_drawn_once() -> None:
    first = replace(request(request_id="once"), request_id="")
    assert first.request_id == first.to_message().request_id != ""
    assert replace(first, request_id="").request_id not in ("", first.request_id)
    assert replace(first, resume_offset=3).request_id == first.request_id


@pytest.mark.parametrize("num_before", [0, 2, 4, 8])
async def test_a_broken_stream_goes_on_at_the_next_address(num_before: int) -> None:
    before = [accepted(), *(delta(offset, 2) for offset in range(0, num_before, 2)), BROKEN]
    first, second = ScriptedService([before]), ScriptedService([whole(num_before)])
    events = await run(first, second)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(event.text for event in deltas) == TEXT
    assert [token_id for event in deltas for token_id in event.token_ids] == list(range(len(WORDS)))
    assert sum(isinstance(event, Accepted) for event in events) == 1
    begun, resumed = first.requests[0], second.requests[0]
    assert resumed.resume_offset == num_before
    resumed.ClearField("resume_offset")
    assert begun.request_id
    assert resumed == begun


async def test_a_server_that_stops_is_left_for_the_other() -> None:
    first, second = ScriptedService([[accepted(), delta(0, 4), HANG]]), ScriptedService([whole(4)])
    async with serving(second) as (other,):
        async with serving(first) as (lost,):
            client = OutriderClient([lost, other], retry=QUICK)
            events = client.generate(request())
            text = ""
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                    break
        async for event in events:
            text += event.text if isinstance(event, Delta) else ""
        await client.close()
    assert text == TEXT
    assert second.requests[0].resume_offset == 4


async def test_calls_go_by_turns_to_all_addresses_of_a_name() -> None:
    """As to those of a headless Service: one of two that ends takes no more than its own calls with it."""
    services = ScriptedService(), ScriptedService()
    async with serving(*services) as addresses:
        async with OutriderClient(f"ipv4:{','.join(addresses)}", retry=QUICK) as client:
            # Until both are connected, the one that is serves all.
            async with asyncio.timeout(20):
                while not all(len(service.requests) > 2 for service in services):
                    await client.complete(request())
        async with OutriderClient(f"ipv4:127.0.0.1:1,{addresses[0]}", retry=QUICK) as client:
            assert (await client.complete(request())).text == TEXT


async def test_an_address_where_nobody_listens_is_passed_over() -> None:
    service = ScriptedService()
    async with serving(service) as (address,), OutriderClient(["127.0.0.1:1", address], retry=QUICK) as client:
        assert (await client.complete(request())).text == TEXT


async def test_calls_side_by_side_do_not_push_each_other_to_a_dead_address() -> None:
    service = ScriptedService([whole() for _ in range(40)])
    policy = RetryPolicy(max_attempts=2, initial_backoff_s=0.01, max_backoff_s=0.02)
    async with serving(service) as (address,), OutriderClient(["127.0.0.1:1", address], retry=policy) as client:
        # Each meets the dead one once at most: of two attempts in a row one is at the address that answers.
        results = await asyncio.gather(*(client.complete(request()) for _ in range(40)))
    assert {result.text for result in results} == {TEXT}


async def test_attempts_are_bounded() -> None:
    service = ScriptedService([[BROKEN]])
    with pytest.raises(Unavailable, match="connection reset"):
        await run(service)
    assert len(service.requests) == QUICK.max_attempts


async def test_attempts_count_only_while_no_token_comes() -> None:
    broken = [[accepted(), delta(offset, 1), BROKEN] for offset in range(len(WORDS))]
    service = ScriptedService([*broken, [accepted(), finished()]])
    async with serving(service) as addresses, OutriderClient(addresses, retry=QUICK) as client:
        assert (await client.complete(request())).text == TEXT


async def test_a_stream_that_ends_without_an_end_is_resumed() -> None:
    service = ScriptedService([[accepted(), delta(0, 2)], whole(2)])
    async with serving(service) as addresses, OutriderClient(addresses, retry=QUICK) as client:
        assert (await client.complete(request())).text == TEXT


@pytest.mark.parametrize("error", [Draining("going"), Overloaded("full", retry_after_s=0.01), Unavailable("no target")])
async def test_refusals_that_may_pass_are_tried_elsewhere(error: OutriderError) -> None:
    events = await run(ScriptedService([[error]]), ScriptedService())
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize(
    "error", [InvalidArgument("top_p is 3", "top_p"), Fenced("newer lease"), DataLoss("gone"), SessionBusy("busy")]
)
async def test_other_refusals_are_raised_as_they_are(error: OutriderError) -> None:
    service = ScriptedService([[error]])
    with pytest.raises(type(error)) as caught:
        await run(service)
    assert caught.value.message == error.message
    assert caught.value.metadata == error.metadata
    assert len(service.requests) == 1


async def test_a_request_begun_without_our_knowing_is_taken_over() -> None:
    service = ScriptedService([[BROKEN], [SessionBusy("held by an orchestrator that is gone")], whole()])
    async with serving(service) as addresses, OutriderClient(addresses, retry=QUICK) as client:
        assert (await client.complete(request())).text == TEXT
    assert [asked.HasField("resume_offset") for asked in service.requests] == [False, False, True]


async def test_a_session_that_another_request_holds_stays_busy() -> None:
    service = ScriptedService([[BROKEN], [SessionBusy("busy")], [RequestNotFound("none")], [SessionBusy("busy")]])
    with pytest.raises(SessionBusy):
        await run(service)
    assert [asked.HasField("resume_offset") for asked in service.requests] == [False, False, True, False]


@pytest.mark.parametrize("jump", [delta(1), delta(6, 2)])
async def test_a_repeated_or_missing_token_is_never_handed_out(jump: object) -> None:
    service = ScriptedService([[accepted(), delta(0, 4), jump]])  # type: ignore[list-item]
    with pytest.raises(DataLoss, match="jumped"):
        await run(service)


async def test_an_end_that_contradicts_the_tokens_received_is_an_error() -> None:
    with pytest.raises(DataLoss, match="ended at 10 tokens, 4"):
        await run(ScriptedService([[accepted(), delta(0, 4), finished(10)]]))


async def test_the_deadline_bounds_a_silent_stream() -> None:
    service = ScriptedService([[accepted(), HANG]])
    async with serving(service) as addresses, OutriderClient(addresses) as client:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.complete(request(), timeout_s=0.2)
    assert time.monotonic() - begin < 2


async def test_the_deadline_bounds_trying_again() -> None:
    policy = RetryPolicy(max_attempts=1000, initial_backoff_s=0.05, max_backoff_s=0.05)
    async with OutriderClient("127.0.0.1:1", retry=policy) as client:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.complete(request(), timeout_s=0.3)
    assert time.monotonic() - begin < 2


async def test_leaving_the_stream_ends_the_call_at_the_server() -> None:
    service = ScriptedService([[accepted(), delta(0, 2), HANG]])
    async with serving(service) as addresses, OutriderClient(addresses) as client:
        async with aclosing(client.generate(request())) as events:
            async for event in events:
                if isinstance(event, Delta):
                    # A call that ends before has not come to where its end shows.
                    await service.hangs.wait()
                    break
        async with asyncio.timeout(5):
            await service.left.wait()


async def test_cancelling_the_task_ends_the_call_at_the_server() -> None:
    service = ScriptedService([[accepted(), HANG]])
    async with serving(service) as addresses, OutriderClient(addresses) as client:
        task = asyncio.create_task(client.complete(request()))
        await service.hangs.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await service.left.wait()


async def test_cancel_ends_the_request_with_a_terminal_event() -> None:
    script = [accepted(), delta(0, 2), HANG, finished(2, tokens_pb2.FINISH_REASON_CANCELLED)]
    service = ScriptedService([script])
    async with serving(service) as addresses, OutriderClient(addresses) as client:
        async with aclosing(client.generate(request())) as events:
            async for event in events:
                if isinstance(event, Delta):
                    assert await client.cancel("s")
        assert isinstance(event, Finished)
        assert event.finish_reason is FinishReason.CANCELLED


async def test_sessions_and_models() -> None:
    service = ScriptedService()
    async with serving(service) as addresses, OutriderClient(["127.0.0.1:1", *addresses], retry=QUICK) as client:
        assert (await client.get_session("s")).committed_len == 13
        with pytest.raises(SessionNotFound):
            await client.get_session("other")
        await client.delete_session("s")
        assert (await client.list_models()).default_num_speculative_tokens == 5
    assert service.deleted == ["s"]


async def test_metadata_travels_with_every_call() -> None:
    service = ScriptedService()
    async with serving(service) as addresses, OutriderClient(addresses, metadata=[("tenant", "a")]) as client:
        await client.complete(request())
    assert service.metadata[0]["tenant"] == "a"


async def test_a_gateway_sees_the_session_of_each_generation() -> None:
    service = ScriptedService()
    async with serving(service) as addresses, OutriderClient(addresses) as client:
        await client.complete(request(session_id="chat-1"))
        await client.complete(request())
    assert [call.get("x-outrider-session") for call in service.metadata] == ["chat-1", None]


async def test_a_request_begun_elsewhere_is_resumed_at_its_offset() -> None:
    service = ScriptedService([whole(6)])
    events = await run(service, session_id="s", request_id="r", resume_offset=6)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "".join(WORDS[6:])
    assert service.requests[0].resume_offset == 6


async def test_a_conversation_sends_only_what_is_new() -> None:
    service = ScriptedService()
    async with serving(service) as addresses, OutriderClient(addresses) as client:
        conversation = Conversation(client, system="Be brief.")
        for line in ("Hi", "And?"):
            async for _ in conversation.send(line):
                pass
        first_session = conversation.session_id
        await conversation.reset()
        async for _ in conversation.send("Anew"):
            pass
    turns = [[(message.role, message.content) for message in asked.chat.messages] for asked in service.requests]
    assert turns == [
        [("system", "Be brief."), ("user", "Hi")],
        [("user", "And?")],
        [("system", "Be brief."), ("user", "Anew")],
    ]
    assert [asked.session_id == first_session for asked in service.requests] == [True, True, False]
    assert service.deleted == [first_session]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "prompt"),
        ({"text": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [2**32]}, "token_ids"),
        ({"text": "\ud800"}, "text"),
        ({"text": b"a"}, "text"),
        ({"token_ids": "31"}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"messages": [Message("user", "\ud800")]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "author": "b"}]}, "messages[0].author"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": {"role": "user", "content": "a"}}, "messages"),
        ({"text": "a", "parameters": {"max_tokens": 3}}, "parameters"),
        ({"text": "a", "speculation": False}, "speculation"),
        ({"text": "a", "prediction": "\ud800"}, "prediction"),
        ({"text": "a", "prediction": [-1]}, "prediction"),
        ({"text": "a", "prediction": 7}, "prediction"),
        ({"text": "a", "parameters": SamplingParameters(stop_token_ids=(-1,))}, "stop_token_ids"),
        ({"text": "a", "request_id": "r", "resume_offset": -1}, "resume_offset"),
        ({"text": "a", "resume_offset": 3}, "request_id"),
    ],
)
def test_what_no_message_can_carry_names_its_field(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        GenerationRequest(**values).to_message()  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        ("Hello", {"text": "Hello"}),
        ("", {"text": ""}),
        ([3, 1, 4], {"token_ids": (3, 1, 4)}),
        (range(3), {"token_ids": (0, 1, 2)}),
        ([{"role": "user", "content": "Hi"}], {"messages": (Message("user", "Hi"),)}),
        (
            [Message("system", "a"), {"role": "user", "content": "b"}],
            {"messages": (Message("system", "a"), Message("user", "b"))},
        ),
    ],
)
def test_a_prompt_is_what_it_looks_like(prompt: Prompt, form: dict[str, object]) -> None:
    made = GenerationRequest.of(prompt)
    assert {name: getattr(made, name) for name in ("text", "token_ids", "messages")} == {
        "text": None,
        "token_ids": None,
        "messages": None,
        **form,
    }


@pytest.mark.parametrize("prompt", [[], None, 3, b"a", ["a", "b"], {"role": "user", "content": "a"}, Message("a", "b")])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidArgument, match="must be a text, a list of token ids or a list of messages") as caught:
        GenerationRequest.of(prompt)  # type: ignore[arg-type]
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "given", [{"parameters": SamplingParameters()}, {"speculation": Speculation()}, {"session_id": "s"}]
)
def test_nothing_beside_a_whole_request_is_ignored(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="beside a request") as caught:
        GenerationRequest.of(request(), **given)
    assert caught.value.field == next(iter(given))


def test_a_request_keeps_what_it_was_made_with() -> None:
    token_ids = [1, 2]
    made = GenerationRequest(token_ids=token_ids)
    token_ids.append(3)
    assert made.token_ids == (1, 2)
    assert GenerationRequest.of(made) is made


async def test_a_prompt_has_its_parameters_beside_it() -> None:
    service = ScriptedService()
    async with serving(service) as addresses, AsyncClient(addresses) as client:
        parameters = SamplingParameters(max_tokens=20)
        deltas = [event async for event in client.generate("Hello", parameters) if isinstance(event, Delta)]
        await client.complete([1, 2], speculation=Speculation(disabled=True), session_id="mine")
        await client.complete([{"role": "user", "content": "Hi"}])
    assert "".join(event.text for event in deltas) == TEXT
    text, token_ids, chat = service.requests
    assert (text.text, text.parameters.max_tokens) == ("Hello", 20)
    assert (list(token_ids.token_ids.token_ids), token_ids.session_id) == ([1, 2], "mine")
    assert token_ids.speculation.disabled
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "Hi")]


async def test_a_wrong_prompt_is_refused_before_anything_is_sent() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument):
            client.generate([{"role": "user"}])


async def test_a_conversation_answers_whole() -> None:
    service = ScriptedService()
    async with serving(service) as addresses, AsyncClient(addresses) as client:
        conversation = client.conversation("Be brief.", SamplingParameters(max_tokens=9), session_id="mine")
        assert (await conversation.ask("Hi")).text == TEXT
        assert (await conversation.ask("And?", timeout_s=5)).finish_reason is FinishReason.LENGTH
    first, second = service.requests
    assert [message.content for message in first.chat.messages] == ["Be brief.", "Hi"]
    assert [message.content for message in second.chat.messages] == ["And?"]
    assert (first.session_id, first.parameters.max_tokens) == ("mine", 9)


async def test_a_closed_client_says_so() -> None:
    service = ScriptedService()
    async with serving(service) as addresses:
        client = AsyncClient(addresses)
        await client.complete("Hello")
        await client.close()
        await client.close()
        for call in (client.complete("Hello"), client.cancel("s"), client.get_session("s"), client.list_models()):
            with pytest.raises(ClientClosed, match="the client is closed"):
                await call
    assert len(service.requests) == 1


@pytest.mark.parametrize("script", [[accepted(), delta(0, 2), HANG], [HANG]])
async def test_closing_ends_what_runs(script: list[object]) -> None:
    service = ScriptedService([script])  # type: ignore[list-item]
    async with serving(service) as addresses:
        client = AsyncClient(addresses)
        task = asyncio.create_task(client.complete("Hello"))
        await service.hangs.wait()
        await client.close()
        with pytest.raises(ClientClosed):
            await task
        async with asyncio.timeout(5):
            await service.left.wait()


async def test_closing_ends_attempts_too() -> None:
    client = AsyncClient("127.0.0.1:1", retry=RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.05, max_attempts=999))
    task = asyncio.create_task(client.list_models())
    await asyncio.sleep(0.1)
    await client.close()
    with pytest.raises(ClientClosed):
        await asyncio.wait_for(task, 5)


async def test_a_cancelled_task_is_cancelled_also_when_the_client_closes() -> None:
    service = ScriptedService([[accepted(), HANG]])
    async with serving(service) as addresses:
        client = AsyncClient(addresses)
        task = asyncio.create_task(client.complete("Hello"))
        while not service.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    "addresses",
    [
        [], "", " ", "localhost", ["127.0.0.1:1", "localhost"], "[::1]", "::1", "localhost:", "localhost:0",
        "localhost:65536", "localhost:http", ":50050", "http://localhost:50050", "a:1,b:2", "dns:///localhost", [5],
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_wrong_addresses_are_refused_by_name(kind: type[AsyncClient], addresses: Any) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidArgument, match="^addresses: ") as caught:  # noqa: RUF043
        kind(addresses)
    assert caught.value.field == "addresses"
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:50050", "localhost:1", "[::1]:50050", "a-b.c_d.svc:65535", "dns:///name:50050", "unix:/tmp/socket"],
)
def test_addresses_are_hosts_with_ports_or_names_of_grpc(address: str) -> None:
    assert AsyncClient(address).addresses == (address,)
