"""Attacks 4 and 8 to 12: what a caller may send to a worker is bounded, and costs its own sessions only."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from draft_service import servicer as draft_servicer
from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters
from outrider.serving.inbox import MAX_WAITING_BYTES, MAX_WAITING_ITEMS
from outrider.serving.status import peer_errors
from outrider.v1 import draft_pb2, target_pb2_grpc, tokens_pb2
from outrider.v1 import target_pb2 as pb
from target_service import servicer as target_servicer
from target_service.stream import VerifyStream
from tests.draft_service.conftest import advance_frame, ngram_drafter, open_frame, running_draft
from tests.target_service.conversation import Caller, target

PROMPT = [1, 2, 3, 4]
GREEDY = SamplingParameters(temperature=0, max_tokens=40, ignore_eos=True)
VERIFY = "/outrider.v1.TargetService/Verify"
DRAFT = "/outrider.v1.DraftService/Draft"
EMPTY_FRAMES = b"\x0a\x00" * 2_000_000
"""A message of two million frames with nothing in them."""
ENDLESS = "s" * (1 << 20)


def refusal_of(frame: Any) -> tuple[str, str]:
    """Returns reason and field of a frame, which must be a refusal."""
    assert frame.WhichOneof("frame") == "refusal", frame
    return frame.refusal.reason, frame.refusal.metadata["field"]


async def test_attack_04_logprobs_beyond_the_vocabulary() -> None:
    async with target() as (engine, caller):
        refused = await caller.open(1, PROMPT, SamplingParameters(temperature=0, logprobs=13))
        assert refusal_of(refused) == ("INVALID_ARGUMENT", "logprobs")
        assert len(await caller.plain(2, PROMPT, SamplingParameters(temperature=0, max_tokens=3, logprobs=12))) == 3
        assert engine.host.loop.is_alive


async def test_attack_08_stop_token_ids_outside_the_vocabulary() -> None:
    parameters = SamplingParameters(temperature=0, min_tokens=5, max_tokens=10)
    async with target() as (engine, caller):
        for handle, stop in ((1, 12), (2, 2**32 - 1)):
            refused = await caller.open(handle, PROMPT, parameters, stop_token_ids=(stop,))
            assert refusal_of(refused) == ("INVALID_ARGUMENT", "stop_token_ids")
        assert len(await caller.plain(3, PROMPT, parameters, stop_token_ids=())) == 10
        assert engine.host.loop.is_alive


async def test_attack_09_millions_of_empty_frames_end_their_stream() -> None:
    async with target() as (engine, caller), running_draft(ngram_drafter()) as draft:
        for channel, method in ((caller.channel, VERIFY), (draft.channel, DRAFT)):
            call = channel.stream_stream(method)()
            await call.write(EMPTY_FRAMES)
            with pytest.raises(InvalidArgument) as caught, peer_errors():
                await call.read()
            assert caught.value.field == "frames"
        assert len(await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())) == 40
        assert engine.host.loop.is_alive


class Flood:
    """A stream of its own, on which a message is sent again and again, for as long as it is taken."""

    def __init__(self, caller: Caller, message: pb.VerifyRequest) -> None:
        self._call = target_pb2_grpc.TargetServiceStub(caller.channel).Verify()
        self._message = message
        self._task = asyncio.create_task(self._run())
        self.num_sent = 0

    async def _run(self) -> None:
        while True:
            await self._call.write(self._message)
            self.num_sent += 1

    async def end(self) -> None:
        """Ends the stream, which the target must not have done."""
        assert not self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._call.cancel()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_attack_09_what_waits_for_an_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an engine is in a long pass a caller can send no more than a bounded number of frames, and of bytes."""
    windows = pb.VerifyRequest(frames=[pb.VerifyRequestFrame(handle=1, window=pb.VerifyWindow(window_end=1))] * 1000)
    span = pb.VerifyRequestFrame(handle=1, span=tokens_pb2.TokenSpan(token_ids=[5] * 30_000))
    async with target() as (engine, caller):
        close, ended = engine.host.end_stream, asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()

        def noted(stream: VerifyStream) -> None:
            close(stream)
            loop.call_soon_threadsafe(ended.release)

        monkeypatch.setattr(engine.host, "end_stream", noted)
        for message, most in (
            (windows, MAX_WAITING_ITEMS),
            (pb.VerifyRequest(frames=[span] * 20), -(-MAX_WAITING_BYTES // span.ByteSize())),
        ):
            is_over = threading.Event()
            engine.host.run_in_engine(functools.partial(is_over.wait, 20))
            flood = Flood(caller, message)
            await until(lambda most=most: engine.host.loop.num_waiting >= most)  # type: ignore[misc]
            num_sent = -1
            while num_sent != flood.num_sent:
                num_sent = flood.num_sent
                await asyncio.sleep(0.05)
            assert engine.host.loop.num_waiting == most
            is_over.set()
            await flood.end()
            # Until then the target goes on reading it, and what of it waits would be counted with the next one.
            await asyncio.wait_for(ended.acquire(), 10)
            assert not engine.host.loop.num_waiting
        assert len(await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())) == 40


async def seconds_of(caller: Caller, handle: int, num_tokens: int) -> float:
    """Returns how long a generation takes."""
    began_s = time.monotonic()
    parameters = SamplingParameters(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    assert len(await caller.plain(handle, PROMPT, parameters, stop_token_ids=())) == num_tokens
    return time.monotonic() - began_s


@pytest.mark.parametrize("kind", ["window", "proposal", "speculation"])
async def test_attack_10_a_flood_of_frames_leaves_another_stream_its_passes(kind: str) -> None:
    frames = {
        "window": pb.VerifyRequestFrame(handle=7, window=pb.VerifyWindow(committed_len=1, window_end=2)),
        "proposal": pb.VerifyRequestFrame(handle=7, proposal=tokens_pb2.Proposal(complete=True)),
        "speculation": pb.VerifyRequestFrame(handle=7, speculation=pb.SpeculationSettings(max_wait_s=1)),
    }
    async with target() as (engine, caller):
        engine._model.options = type(engine._model.options)(vocabulary=12, order=2, step_s=0.005)  # type: ignore[attr-defined]
        alone_s = await seconds_of(caller, 1, 30)
        flood = Flood(caller, pb.VerifyRequest(frames=[frames[kind]] * 4000))
        await until(lambda: flood.num_sent > 3)
        beside_s = await seconds_of(caller, 2, 30)
        num_sent = flood.num_sent
        await flood.end()
    assert num_sent > 5
    # It was from 172 tokens a second to 1 or 2, so 15 s at least. Reading the flood takes its share of the interpreter
    # here, too, and beside other processes that share is most of it.
    assert beside_s < 6 * alone_s + 10


@pytest.mark.parametrize("field", ["session_id", "request_id", "traceparent", "cache_salt"])
async def test_attack_11_names_are_bounded(field: str) -> None:
    value: str | bytes = ENDLESS.encode() if field == "cache_salt" else ENDLESS
    async with target() as (engine, caller), running_draft(ngram_drafter()) as draft:
        message = pb.VerifyOpen(**{"session_id": "s", field: value})
        await caller.send(1, open=message)
        assert refusal_of(await caller.receive(1)) == ("INVALID_ARGUMENT", field)
        client = draft.stream()
        frame = open_frame(1)
        setattr(frame.open, field, value)
        await client.send(frame)
        assert refusal_of(await client.receive(1)) == ("INVALID_ARGUMENT", field)
        assert engine.requests.num_residents == 0
        assert draft.engine.load.num_cached_sessions == 0


async def test_attack_11_what_a_request_may_ask_of_a_target_is_bounded() -> None:
    """Planning a main line of four thousand million tokens would take for ever."""
    async with target() as (engine, caller):
        for handle, (field, changes) in enumerate(
            (
                ("num_speculative_tokens", {"speculation": pb.SpeculationSettings(num_speculative_tokens=2**32 - 1)}),
                ("stop_token_ids", {"stop_token_ids": [1] * 100_000}),
                ("feature_layers", {"feature_layers": [1] * 100_000}),
            )
        ):
            await caller.send(handle, open=pb.VerifyOpen(session_id="s", **changes))
            assert refusal_of(await caller.receive(handle)) == ("INVALID_ARGUMENT", field)
        await caller.open(9, PROMPT, GREEDY)
        await caller.span(9, 0, [1] * 500_000)
        assert refusal_of(await caller.receive(9)) == ("INVALID_ARGUMENT", "span")
        assert engine.host.loop.is_alive


async def test_attack_12_an_error_while_a_target_decodes_a_frame_ends_one_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = target_servicer.command_from_frame

    def broken(frame: pb.VerifyRequestFrame, *more: Any) -> Any:
        if list(frame.span.token_ids) == [9, 9]:
            raise KeyError("no such field")
        return read(frame, *more)

    monkeypatch.setattr(target_servicer, "command_from_frame", broken)
    async with target() as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        for handle in (2, 3):
            await caller.open(handle, [9, 9], GREEDY, stop_token_ids=())
            await caller.span(handle, 0, [9, 9])
            assert refusal_of(await caller.receive(handle)) == ("REQUEST_FAILED", "")
            assert await caller.plain(handle + 10, PROMPT, GREEDY, stop_token_ids=()) == truth
        assert engine.num_requests <= 1
    records = [record for record in caplog.records if record.message == "the frame could not be read"]
    assert len(records) == 1
    assert records[0].exc_info


async def test_attack_12_an_error_while_a_draft_decodes_a_frame_ends_one_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = draft_servicer.command_from_frame

    def broken(frame: draft_pb2.DraftRequestFrame, *more: Any) -> Any:
        if list(frame.advance.span.token_ids) == [9, 9]:
            raise KeyError("no such field")
        return read(frame, *more)

    monkeypatch.setattr(draft_servicer, "command_from_frame", broken)
    async with running_draft(ngram_drafter()) as draft:
        client = draft.stream()
        other, _ = await client.open("other")
        for name in ("a", "b"):
            handle, _ = await client.open(name)
            await client.send(advance_frame(handle, [9, 9]))
            assert refusal_of(await client.receive(handle)) == ("REQUEST_FAILED", "")
        assert await client.drafted(other, [1, 2, 3, 1]) == (2, 3, 1, 2)
        await draft.until(lambda: draft.engine.load.num_active_sessions == 1)
    records = [record for record in caplog.records if record.message == "the frame could not be read"]
    assert len(records) == 1
    assert records[0].exc_info
