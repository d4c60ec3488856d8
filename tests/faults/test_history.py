"""The checker catches what it is there for: each bug is planted in the real orchestrator, and found."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.generation.generation import Generation
from orchestrator.generation.worker_pair import WorkerPair
from orchestrator.store.sessions import Committed, Lease
from orchestrator.store.store import SessionStore
from outrider.client import GenerationRequest, OutriderClient
from outrider.client.retry import RetryPolicy
from outrider.local.valkey import EmbeddedValkey
from outrider.parameters import SamplingParameters
from outrider.v1 import target_pb2
from tests.faults.history import HistoryError, Record, check, monitored, read_log, watch
from tests.orchestrator.scripted import ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, Orchestrator, orchestrating

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
async def orchestrator(tmp_path: Path, target: ScriptedTarget) -> AsyncIterator[Orchestrator]:
    with EmbeddedValkey(tmp_path, durable=False) as server:
        async with orchestrating(server.url, (target,)) as running:
            yield running


@pytest.fixture
async def target() -> AsyncIterator[ScriptedTarget]:
    async with ScriptedTarget() as running:
        yield running


def request(session_id: str = "s", **more: Any) -> GenerationRequest:
    parameters = SamplingParameters(max_tokens=20, seed=1)
    return GenerationRequest(token_ids=PROMPT, session_id=session_id, parameters=parameters, **more)


def plain(asked: GenerationRequest) -> Sequence[int]:
    return continuation(PROMPT, asked.parameters.max_tokens)


async def run(orchestrator: Orchestrator, target: ScriptedTarget) -> Record:
    """Runs a request whose target pauses, so that it is committed in parts."""
    target.allow(7)
    async with OutriderClient(orchestrator.address, retry=RetryPolicy(max_attempts=1)) as client:
        record = await watch(client, request(), after=7, strike=lambda: target.allow(None), timeout_s=5)
        with contextlib.suppress(Exception):
            await read_log(client, record)
    return record


async def test_a_run_without_a_bug_passes(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    async with monitored(orchestrator.redis_url) as commits:
        record = await run(orchestrator, target)
    check([record], plain)
    commits.check()
    assert commits.num_appends >= 2
    assert record.log == plain(record.request)


def skip_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    append = SessionStore.append

    async def skipping(self: SessionStore, lease: Lease, expected_len: int, tokens: Sequence[int], *more: Any) -> Any:
        # All from there on: a single one is noticed by the next, and what the store lacks is written again.
        if expected_len >= len(PROMPT) + 7:
            return Committed(expected_len + len(tokens), False)
        return await append(self, lease, expected_len, tokens, *more)

    monkeypatch.setattr(SessionStore, "append", skipping)


def double_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Generation.events

    async def doubling(self: Generation) -> AsyncIterator[Any]:
        async for event in events(self):
            yield event
            if event.HasField("delta"):
                yield event

    monkeypatch.setattr(Generation, "events", doubling)
    # The client would notice by itself; here it is to take what comes.
    monkeypatch.setattr("outrider.client.stream.ResumableStream._checked", lambda self, event: event)


def apply_a_stale_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    take = WorkerPair._on_verdict

    def applying(self: WorkerPair, verdict: target_pb2.Verdict) -> None:
        take(self, verdict)
        # Not in the part that the target pauses after: it would be asked for that part again.
        if not verdict.finish_reason and verdict.base.len >= len(PROMPT) + 7:
            stale = target_pb2.Verdict.FromString(verdict.SerializeToString())
            stale.base.len = self._tokens.end
            take(self, stale)

    monkeypatch.setattr(WorkerPair, "_on_verdict", applying)


@pytest.mark.parametrize("plant", [skip_a_commit, double_a_delta, apply_a_stale_verdict])
async def test_a_planted_bug_is_found(
    orchestrator: Orchestrator, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    record = await run(orchestrator, target)
    with pytest.raises(HistoryError):
        check([record], plain)


@pytest.mark.parametrize("is_planted", [False, True], ids=["fenced", "fencing-ignored"])
async def test_an_owner_that_was_fenced_off_and_writes_on_is_found(
    orchestrator: Orchestrator, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch, *, is_planted: bool
) -> None:
    store = orchestrator.store
    async with monitored(orchestrator.redis_url) as commits, OutriderClient(orchestrator.address) as client:
        target.allow(5)
        first = asyncio.create_task(watch(client, request(request_id="r"), timeout_s=5))
        async with asyncio.timeout(5):
            # As many tokens as the resumed stream says that it has.
            while (record := await store.get("default", "s")) is None or record.committed_len < len(PROMPT) + 3:
                await asyncio.sleep(0.01)
        if is_planted:
            await ignore_fencing(store)
        old = Lease("default", "s", record.fencing_token, 1000)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        # Else it could go on to its end before the second one takes over, which would then be given what is there.
        await target.saw("close")
        second = watch(client, request(request_id="r", resume_offset=3), after=0, timeout_s=5)
        target.allow(None)
        await second
        now = await store.get("default", "s")
        assert now is not None and now.fencing_token > old.fencing_token
        # The one that was taken over comes back, and writes.
        with contextlib.suppress(Exception):
            await store.append(old, now.committed_len, [1, 2, 3])
    if is_planted:
        with pytest.raises(HistoryError, match="while"):
            commits.check()
    else:
        commits.check()


async def ignore_fencing(store: SessionStore) -> None:
    """Has the store's server run an append that does not look at fencing tokens."""
    script = store.connection._scripts["append"]
    source = script.script if isinstance(script.script, str) else script.script.decode()
    careless = source
    for look in ("if token > tonumber(ARGV[1])", "if token < tonumber(ARGV[1])", "if known[4] == 'finished'"):
        assert look in careless
        careless = careless.replace(look, "if false")
    store.connection._scripts["append"] = store.connection.client.register_script(careless)


def test_streams_that_break_off_or_end_twice_are_found() -> None:
    text = tuple(plain(request()))
    whole = Record(request(), [(0, text[:9]), (9, text[9:])], num_terminal=1, log=list(text))
    check([whole], plain)
    wrong = {
        "no end": Record(request(), [(0, text)]),
        "two ends": Record(request(), [(0, text)], num_terminal=2),
        "a gap": Record(request(), [(0, text[:9]), (10, text[10:])], num_terminal=1),
        "a part": Record(request(), [(0, text[:9])], num_terminal=1),
        "another token": Record(request(), [(0, (*text[:-1], text[-1] + 1))], num_terminal=1),
        "a longer log": Record(request(), [(0, text)], num_terminal=1, log=[*text, 1]),
        "a shorter log": Record(request(), [(0, text)], num_terminal=1, log=list(text[:-1])),
    }
    for name, record in wrong.items():
        with pytest.raises(HistoryError):
            check([whole, record], plain)
            pytest.fail(f"{name} was not found")
