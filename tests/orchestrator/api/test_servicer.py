"""Requests of clients, and the errors for bad ones."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench.proxy import proxied
from outrider.errors import DuplicateRequest, InvalidArgument, Overloaded, RequestNotFound, SessionBusy, SessionNotFound
from outrider.serving.status import peer_errors
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import tokens_pb2
from tests.orchestrator.scripted import MAX_SESSION_LEN, VOCABULARY_SIZE, ScriptedDraft, ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, Orchestrator, asking, orchestrating, text_of, tokens_of, until

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def new_id() -> str:
    return uuid.uuid4().hex


def tokenizer_files() -> dict[str, bytes]:
    """A tokenizer of single bytes, with a chat template."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return {"tokenizer.json": tokenizer.to_str().encode(), "chat_template.jinja": TEMPLATE.encode()}


def saying(text: str) -> Any:
    """The next token of a target that repeats a text, whatever the prompt."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())
    spoken = tokenizer.encode(text).ids
    return lambda tokens: spoken[(len(tokens) - len(PROMPT)) % len(spoken)]


@pytest.fixture
async def orchestrator(session_store_url: str, target: ScriptedTarget) -> AsyncIterator[Orchestrator]:
    async with orchestrating(session_store_url, (target,)) as running:
        yield running


@pytest.fixture
async def speaker(session_store_url: str) -> AsyncIterator[Orchestrator]:
    """An orchestrator whose target has a tokenizer and outputs one sentence."""
    async with ScriptedTarget(next_token=saying("one 🙂 two. END of it. ")) as target:
        target.files = tokenizer_files()
        async with orchestrating(session_store_url, (target,)) as running:
            yield running


def predicting(token_ids: list[int], **more: object) -> pb.GenerateRequest:
    """A request with a prediction of its output."""
    request = asking(**more)  # type: ignore[arg-type]
    request.predicted_token_ids.token_ids.extend(token_ids)
    return request


WRONG: list[tuple[pb.GenerateRequest, str]] = [
    (asking([]), "token_ids"),
    (asking([1, VOCABULARY_SIZE]), "token_ids"),
    (asking([1] * MAX_SESSION_LEN), "prompt"),
    (asking(request_id="white space"), "request_id"),
    (asking(session_id="x" * 129), "session_id"),
    (asking(temperature=-1.0), "temperature"),
    (asking(temperature=float("nan")), "temperature"),
    (asking(top_p=0.0), "top_p"),
    (asking(max_tokens=MAX_SESSION_LEN + 1), "max_tokens"),
    (asking(stop_token_ids=[VOCABULARY_SIZE]), "stop_token_ids"),
    (asking(stop=["x"]), "stop"),
    (pb.GenerateRequest(text="hello"), "text"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])), "chat"),
    (pb.GenerateRequest(), "prompt"),
    (
        pb.GenerateRequest(
            token_ids=pb.TokenIds(token_ids=[1]), speculation=pb.SpeculationParameters(num_speculative_tokens=65)
        ),
        "num_speculative_tokens",
    ),
    (
        pb.GenerateRequest(
            token_ids=pb.TokenIds(token_ids=[1]), speculation=pb.SpeculationParameters(drafter="psychic")
        ),
        "drafter",
    ),
    (predicting([VOCABULARY_SIZE]), "prediction"),
    (predicting([1] * (MAX_SESSION_LEN + 1)), "prediction"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1]), predicted_text="hello"), "prediction"),
]


async def test_wrong_requests_are_refused_by_the_name_of_their_field(orchestrator: Orchestrator) -> None:
    for request, field in WRONG:
        with pytest.raises(InvalidArgument) as caught:
            await orchestrator.events(request)
        assert caught.value.field == field, request


async def test_wrong_chats(speaker: Orchestrator) -> None:
    for messages, field in (([], "chat"), ([pb.ChatMessage(role="wizard", content="hello")], "role")):
        with pytest.raises(InvalidArgument) as caught:
            await speaker.events(pb.GenerateRequest(chat=pb.Chat(messages=messages)))
        assert caught.value.field == field


async def test_unknown_sessions(orchestrator: Orchestrator) -> None:
    stub, unknown = orchestrator.stub, new_id()
    for call in (
        stub.GetSession(pb.GetSessionRequest(session_id=unknown)),
        stub.CancelGeneration(pb.CancelGenerationRequest(session_id=unknown)),
        stub.DeleteSession(pb.DeleteSessionRequest(session_id=unknown)),
    ):
        with pytest.raises(SessionNotFound), peer_errors():
            await call
    with pytest.raises(SessionNotFound):
        await orchestrator.events(asking(request_id=new_id(), resume_offset=0))


async def test_a_request_id_belongs_to_one_content(orchestrator: Orchestrator) -> None:
    request_id = new_id()
    events = await orchestrator.events(asking(request_id=request_id))
    session_id = events[0].accepted.session_id
    again = await orchestrator.events(asking(request_id=request_id))
    assert again[0] == events[0]
    assert tokens_of(again) == tokens_of(events)
    assert len((await orchestrator.session(session_id)).token_ids) == 23
    with pytest.raises(DuplicateRequest):
        await orchestrator.events(asking([1], request_id=request_id))
    with pytest.raises(InvalidArgument) as caught:
        await orchestrator.events(asking(request_id=request_id, resume_offset=21))
    assert caught.value.field == "resume_offset"
    with pytest.raises(RequestNotFound):
        await orchestrator.events(asking(request_id=new_id(), session_id=session_id, resume_offset=0))


async def test_a_request_without_an_id_is_resumed_by_the_one_that_it_was_given(orchestrator: Orchestrator) -> None:
    events = await orchestrator.events(asking())
    again = await orchestrator.events(asking(request_id=events[0].accepted.request_id, resume_offset=0))
    assert again[0] == events[0]
    assert tokens_of(again) == tokens_of(events)


async def test_a_prediction_is_counted_over_the_whole_output(orchestrator: Orchestrator) -> None:
    output = continuation(PROMPT, 20)
    changed = [*output[:6], VOCABULARY_SIZE - 1, *output[7:]]
    found = (await orchestrator.events(predicting(changed)))[-1].finished.statistics
    assert (found.num_prediction_tokens, found.num_accepted_prediction_tokens) == (20, 16)
    assert not (await orchestrator.events(asking()))[-1].finished.statistics.num_prediction_tokens


async def test_a_draft_that_uses_predictions_gets_them(session_store_url: str, target: ScriptedTarget) -> None:
    async with ScriptedDraft() as model, ScriptedDraft() as suffix:
        model.info.drafter, suffix.info.drafter = "model", "suffix"
        async with orchestrating(session_store_url, (target,), (model, suffix)) as orchestrator:
            await until(lambda: all(link.is_up for link in orchestrator.replicas.drafts))
            await orchestrator.events(predicting([1, 2, 3]))
            assert [list(message.prediction) for message in suffix.of("open")] == [[1, 2, 3]]
            assert not model.of("open")
            named = predicting([1, 2, 3])
            named.speculation.drafter = "model"
            await orchestrator.events(named)
            assert [list(message.prediction) for message in model.of("open")] == [[]]
            assert len(suffix.of("open")) == 1


async def test_a_session_runs_one_request_at_a_time(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    target.allow(2)
    session_id = new_id()
    running = asyncio.create_task(orchestrator.events(asking(session_id=session_id)))
    await target.saw("open")
    with pytest.raises(SessionBusy):
        await orchestrator.events(asking([1], session_id=session_id))
    target.allow(None)
    assert tokens_of(await running) == continuation(PROMPT, 20)


async def test_the_seed_is_drawn_once_and_kept(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    request = asking(request_id=new_id())
    first, again = await orchestrator.events(request), await orchestrator.events(request)
    assert first[0].accepted.seed == again[0].accepted.seed
    assert target.of("open")[0].parameters.seed == first[0].accepted.seed
    other = await orchestrator.events(asking())
    assert other[0].accepted.seed != first[0].accepted.seed


async def test_beyond_the_limit_requests_are_told_to_come_again(session_store_url: str, target: ScriptedTarget) -> None:
    target.allow(2)
    async with orchestrating(
        session_store_url, (target,), max_active_requests=1, max_queued_requests=0
    ) as orchestrator:
        running = asyncio.create_task(orchestrator.events(asking()))
        await target.saw("open")
        with pytest.raises(Overloaded) as caught:
            await orchestrator.events(asking())
        assert caught.value.retry_after_s > 0
        target.allow(None)
        await running
        await orchestrator.events(asking())


async def test_a_deleted_session_is_gone(orchestrator: Orchestrator) -> None:
    session_id = new_id()
    await orchestrator.events(asking(session_id=session_id))
    await orchestrator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
    with pytest.raises(SessionNotFound):
        await orchestrator.session(session_id)
    events = await orchestrator.events(asking(session_id=session_id))
    assert events[0].accepted.session_len == 0


async def test_workers_forget_a_deleted_session(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        session_id = new_id()
        await orchestrator.events(asking(session_id=session_id))
        await orchestrator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
        (name,) = {message.session_id for message in target.opened}
        for worker in (target, draft):
            assert [message.session_id for message in await worker.saw("forget")] == [name]
        # Another one of the same name is another session.
        await orchestrator.events(asking(session_id=session_id))
        assert len({message.session_id for message in target.opened}) == 2


async def test_workers_out_of_reach_do_not_hold_up_a_deletion(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    async with (
        proxied(target.address) as proxy,
        orchestrating(session_store_url, (target,), (draft,), targets=(proxy.address,)) as orchestrator,
    ):
        session_id = new_id()
        await orchestrator.events(asking(session_id=session_id))
        await proxy.set_blackhole(up=True, down=True)
        await draft.die()
        await until(lambda: not orchestrator.replicas.drafts[0].is_up)
        async with asyncio.timeout(1):
            await orchestrator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
        assert orchestrator.replicas.targets[0].is_up, "nobody has noticed yet that it hears nothing"
        with pytest.raises(SessionNotFound):
            await orchestrator.session(session_id)


async def test_text_comes_in_whole_characters(speaker: Orchestrator) -> None:
    events = await speaker.events(asking(max_tokens=23))
    assert text_of(events) == "one 🙂 two. END of it"
    assert not any("\ufffd" in event.delta.text for event in events)


@pytest.mark.parametrize("window", [1, 3, 64])
async def test_a_stop_string_ends_within_an_accepted_run(session_store_url: str, window: int) -> None:
    async with ScriptedTarget(next_token=saying("one 🙂 two. END of it. ")) as target:
        target.files = tokenizer_files()
        async with orchestrating(session_store_url, (target,), window=window) as orchestrator:
            session_id = new_id()
            events = await orchestrator.events(asking(session_id=session_id, max_tokens=100, stop=["END", "of it"]))
            finished = events[-1].finished
            assert text_of(events) == "one 🙂 two. "
            assert finished.finish_reason == tokens_pb2.FINISH_REASON_STOP
            # The tokens end with the one that completed the stop string; the target forgets what it had beyond.
            num = len("one 🙂 two. END".encode())
            assert finished.num_output_tokens == len(tokens_of(events)) == num
            (close,) = await target.saw("close")
            session = await orchestrator.session(session_id)
            assert close.committed_len == session.committed_len == len(PROMPT) + num
            repeated = await orchestrator.events(
                asking([8], session_id=session_id, max_tokens=1, min_tokens=1, stop=["END"])
            )
            assert repeated[0].accepted.session_len == session.committed_len


async def test_a_resumed_stream_goes_on_within_the_text(session_store_url: str) -> None:
    async with ScriptedTarget(next_token=saying("one 🙂 two. END of it. ")) as target:
        target.files = tokenizer_files()
        async with orchestrating(session_store_url, (target,)) as orchestrator:
            request = asking(request_id=new_id(), max_tokens=60, stop=["END of it. one"])
            whole = await orchestrator.events(request)
            text = text_of(whole)
            for offset in range(len(tokens_of(whole)) + 1):
                request.resume_offset = offset
                rest = text_of(await orchestrator.events(request))
                assert text.endswith(rest)
                assert rest or offset > 10


@pytest.mark.parametrize("replica", ["orchestrator-7", ""])
async def test_the_initial_metadata_names_the_orchestrator(
    session_store_url: str, target: ScriptedTarget, replica: str
) -> None:
    async with orchestrating(session_store_url, (target,), replica=replica) as orchestrator:
        call = orchestrator.stub.Generate(asking())
        assert dict(await call.initial_metadata()).get("x-outrider-replica", "") == replica
        events = [event async for event in call]
        assert events[-1].HasField("finished")
