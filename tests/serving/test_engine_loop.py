"""One loop for every engine: turns, backpressure, gentle commands, failures, drains, liveness."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from outrider.errors import InvalidArgument, OutriderError
from outrider.serving import engine_loop
from outrider.serving.engine_loop import EngineLoop
from outrider.serving.inbox import MAX_WAITING_ITEMS
from outrider.serving.session_failures import EngineFailed

TIMEOUT_S = 10.0


class Recorder:
    """An engine and the handler of its commands. It records what it is called with; commands are words."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sessions: set[str] = set()
        self.num_steps_left = 0
        self.num_turns = 0
        self.next_s: float | None = None
        self.is_broken = False
        self.on_step: Callable[[], object] = lambda: None
        self.failed = threading.Event()
        self.loop: EngineLoop[str] = EngineLoop(self, self, name="recorder", on_failure=self.failed.set)

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def step_s(self) -> float:
        return 0.0

    def apply(self, command: str) -> None:
        self.calls.append(command)
        match command.split():
            case ["open", name]:
                self.sessions.add(name)
            case ["close", name]:
                self.sessions.discard(name)
            case ["wrong", _]:
                raise InvalidArgument("is wrong", "command")
            case ["broken", _]:
                raise ZeroDivisionError
            case ["fatal"]:
                raise EngineFailed("the device is gone")

    def refuse(self, command: str, error: OutriderError) -> None:
        self.calls.append(f"refuse {command}: {error.reason}")

    def fail(self, command: str, error: Exception) -> None:
        self.calls.append(f"fail {command}: {type(error).__name__}")
        self.loop.failures.record("a command failed", error)

    def expire(self) -> None:
        self.num_turns += 1

    def step(self) -> bool:
        self.on_step()
        self.num_steps_left -= self.num_steps_left > 0
        return self.num_steps_left > 0

    def publish(self) -> None:
        self.calls.append("publish")

    def wait_s(self) -> float | None:
        return self.next_s

    def probe(self) -> None:
        self.calls.append("probe")
        if self.is_broken:
            raise EngineFailed("the probe failed")

    @property
    def words(self) -> list[str]:
        """The calls, without those that every turn makes."""
        return [call for call in self.calls if call != "publish"]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not holds():
                await asyncio.sleep(0.002)

    async def settled(self) -> None:
        """Returns once a turn that began after this call has ended."""
        before: list[int] = []
        self.loop.run_in_engine(lambda: before.append(self.calls.count("publish")))
        await self.until(lambda: bool(before) and self.calls.count("publish") > before[0])


@asynccontextmanager
async def running() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    recorder.loop.start()
    try:
        yield recorder
    finally:
        recorder.loop.stop()
        assert not recorder.loop.is_alive


class Pause:
    """Holds an engine in a step until it is let go."""

    def __init__(self, recorder: Recorder) -> None:
        self.is_in_step = threading.Event()
        self.is_over = threading.Event()
        recorder.on_step = self._wait

    def _wait(self) -> None:
        self.is_in_step.set()
        assert self.is_over.wait(TIMEOUT_S)


async def test_writers_are_applied_in_turn_and_each_in_order() -> None:
    async with running() as recorder:
        pause = Pause(recorder)
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(pause.is_in_step.is_set)
        for name in "abc":
            for number in range(3):
                await recorder.loop.submit(name, f"{name} {number}")
        pause.is_over.set()
        await recorder.settled()
        assert recorder.words == [f"{name} {number}" for number in range(3) for name in "abc"]


async def test_its_workers_end_before_it_sleeps_and_not_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as recorder:
        await recorder.settled()
        monkeypatch.setattr(engine_loop, "end_workers", lambda: recorder.calls.append("end workers"))
        recorder.num_steps_left = 20
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(lambda: "end workers" in recorder.calls)
        assert recorder.num_steps_left == 0
        assert recorder.calls[-21:] == [*["publish"] * 20, "end workers"]


async def test_steps_follow_each_other_until_there_is_nothing_to_do() -> None:
    async with running() as recorder:
        await recorder.settled()
        before = recorder.num_turns
        recorder.num_steps_left = 20
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(lambda: recorder.num_steps_left == 0)
        await recorder.until(lambda: recorder.loop.busy_s == 0)
        # One for each step, and those of the call; without sleep there would be thousands by now.
        await asyncio.sleep(0.05)
        assert 20 <= recorder.num_turns - before <= 22


async def test_a_step_comes_at_its_time_without_a_command() -> None:
    async with running() as recorder:
        recorder.next_s = 0.01
        recorder.loop.run_in_engine(lambda: None)
        before = recorder.num_turns
        await recorder.until(lambda: recorder.num_turns > before + 5)


async def test_a_writer_that_sends_too_much_waits_for_itself() -> None:
    async with running() as recorder:
        pause = Pause(recorder)
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(pause.is_in_step.is_set)

        async def flood() -> None:
            for number in range(MAX_WAITING_ITEMS + 100):
                await recorder.loop.submit("flood", f"flood {number}")

        flooding = asyncio.create_task(flood())
        await recorder.until(lambda: recorder.loop.num_waiting >= MAX_WAITING_ITEMS)
        await asyncio.sleep(0.02)
        assert recorder.loop.num_waiting == MAX_WAITING_ITEMS
        assert not flooding.done()
        # Others have room, and the end of a stream needs none.
        await asyncio.wait_for(recorder.loop.submit("other", "other 1"), TIMEOUT_S)
        recorder.loop.submit_now("flood", "end flood")
        pause.is_over.set()
        await asyncio.wait_for(flooding, TIMEOUT_S)
        await recorder.until(lambda: recorder.loop.num_waiting == 0)
        assert "other 1" in recorder.words[:10]


async def test_gentle_commands_are_applied_during_a_step_and_overtake_nothing_of_their_writer() -> None:
    async with running() as recorder:
        called: list[int] = []
        during: list[str] = []
        pause = Pause(recorder)
        wait = recorder.on_step

        def step() -> None:
            wait()
            if not during:
                recorder.loop.apply_commands(lambda command: command.startswith("gentle"))
                during.extend(recorder.words)
                assert not called

        recorder.on_step = step
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(pause.is_in_step.is_set)
        recorder.loop.run_in_engine(lambda: called.append(1))
        for word in ("gentle 1", "other 2", "gentle 3"):
            await recorder.loop.submit("a", word)
        await recorder.loop.submit("b", "gentle 4")
        pause.is_over.set()
        await recorder.settled()
        assert during == ["gentle 1", "gentle 4"]
        assert recorder.words == ["gentle 1", "gentle 4", "other 2", "gentle 3"]
        assert called == [1]


async def test_a_named_error_refuses_its_command_and_probes_nothing() -> None:
    async with running() as recorder:
        await recorder.loop.submit("a", "wrong 1")
        await recorder.loop.submit("a", "right 2")
        await recorder.settled()
        assert recorder.words == ["wrong 1", "refuse wrong 1: INVALID_ARGUMENT", "right 2"]


async def test_failures_of_sessions_are_probed_once_a_turn_before_results_leave() -> None:
    async with running() as recorder:
        pause = Pause(recorder)
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(pause.is_in_step.is_set)
        await recorder.loop.submit("a", "broken 1")
        await recorder.loop.submit("a", "broken 2")
        recorder.calls.clear()
        pause.is_over.set()
        await recorder.until(lambda: "probe" in recorder.calls)
        await recorder.settled()
        calls = recorder.calls
        assert calls.count("probe") == 1
        assert calls[: calls.index("probe")].count("fail broken 1: ZeroDivisionError") == 1
        assert calls[: calls.index("probe")].count("fail broken 2: ZeroDivisionError") == 1
        # Of the step that was paused; none between the failures and the probe.
        assert calls[: calls.index("probe")].count("publish") == 1
        assert recorder.loop.is_alive
        assert not recorder.failed.is_set()


async def test_a_probe_that_fails_ends_the_engine_and_no_result_leaves(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as recorder:
        await recorder.settled()
        recorder.is_broken = True
        num_published = recorder.calls.count("publish")
        await recorder.loop.submit("a", "broken 1")
        await recorder.until(lambda: not recorder.loop.is_alive)
        assert recorder.failed.is_set()
        assert recorder.calls[-1] == "probe"
        # At most that of a turn which had begun before.
        assert recorder.calls.count("publish") <= num_published + 1
    assert "the engine failed" in caplog.messages


@pytest.mark.parametrize("where", ["command", "call", "step"])
async def test_an_engine_that_cannot_go_on_ends_at_once(where: str) -> None:
    def fatal() -> None:
        raise EngineFailed("the device is gone")

    async with running() as recorder:
        recorder.sessions.add("open")
        drained = recorder.loop.drain()
        if where == "command":
            await recorder.loop.submit("a", "fatal")
        elif where == "call":
            recorder.loop.run_in_engine(fatal)
        else:
            recorder.on_step = fatal
            recorder.loop.run_in_engine(lambda: None)
        await recorder.until(lambda: not recorder.loop.is_alive)
        assert recorder.failed.is_set()
        assert "probe" not in recorder.calls
        # A drain does not wait for the sessions of an engine that has ended.
        await asyncio.wait_for(asyncio.wrap_future(drained), TIMEOUT_S)


async def test_a_call_that_fails_is_logged_and_the_engine_probed(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise KeyError("no such block")

    async with running() as recorder:
        recorder.loop.run_in_engine(fails)
        await recorder.settled()
        assert recorder.words == ["probe"]
        assert recorder.loop.is_alive
    (record,) = (record for record in caplog.records if record.message == "a call in the engine's thread failed")
    assert record.exc_info


async def test_a_drain_is_done_once_no_session_is_open() -> None:
    async with running() as recorder:
        assert not recorder.loop.is_draining
        await recorder.loop.submit("a", "open 1")
        await recorder.settled()
        drained = recorder.loop.drain()
        assert recorder.loop.is_draining
        await recorder.settled()
        assert not drained.done()
        await recorder.loop.submit("a", "close 1")
        await asyncio.wait_for(asyncio.wrap_future(drained), TIMEOUT_S)
        assert recorder.loop.drain().done()


async def test_a_drain_whose_waiter_was_cancelled_ends_nothing() -> None:
    async with running() as recorder:
        await recorder.loop.submit("a", "open 1")
        await recorder.settled()
        waiting = asyncio.ensure_future(asyncio.wrap_future(recorder.loop.drain()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await recorder.loop.submit("a", "close 1")
        await recorder.settled()
        assert recorder.loop.is_alive


async def test_liveness_distinguishes_a_long_step_from_sleep() -> None:
    async with running() as recorder:
        await recorder.until(lambda: recorder.loop.busy_s == 0)
        pause = Pause(recorder)
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(pause.is_in_step.is_set)
        await recorder.until(lambda: recorder.loop.busy_s > 0.02)
        pause.is_over.set()
        await recorder.until(lambda: recorder.loop.busy_s == 0)
        assert recorder.loop.is_alive


async def test_a_stop_applies_what_waits() -> None:
    async with running() as recorder:
        pause = Pause(recorder)
        recorder.loop.run_in_engine(lambda: None)
        await recorder.until(pause.is_in_step.is_set)
        recorder.loop.submit_now("a", "open 1")
        stopping = asyncio.create_task(asyncio.to_thread(recorder.loop.stop))
        await asyncio.sleep(0)
        recorder.loop.submit_now("a", "close 1")
        pause.is_over.set()
        await stopping
        assert recorder.words == ["open 1", "close 1"]
        assert not recorder.sessions
