"""Constraints are checked before the lease: in processes that end with what takes too long, and once each."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.api import constraints
from orchestrator.api.constraints import ConstraintChecks
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.workers.model import Model
from outrider import wire
from outrider.constraint import Constraint
from outrider.errors import ConstraintFailed, DuplicateRequest, InvalidArgument, Overloaded, SessionNotFound
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer
from outrider.parameters import SamplingParameters
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import tokens_pb2
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import asking, orchestrating

ENDLESS = Constraint(json_schema='{"type": "integer", "multipleOf": 99999989}')


def model(fingerprint: str = "bytes", *, takes_constraints: bool = True) -> Model:
    definition = byte_tokenizer().files["tokenizer.json"].decode()
    return Model(
        name="m",
        fingerprint="m",
        tokenizer_fingerprint=fingerprint,
        tokenizer=Tokenizer(definition, None, {}),
        vocabulary_size=VOCABULARY_SIZE,
        max_session_len=100,
        eos_token_ids=(EOS,),
        defaults=tokens_pb2.SamplingParameters(),
        takes_constraints=takes_constraints,
    )


@pytest.fixture
async def checks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ConstraintChecks]:
    # Beside other tests that keep all cores busy a check at the lowest priority takes thirty times as long.
    monkeypatch.setattr(constraints, "_LAST_NICENESS", 1)
    monkeypatch.setattr(constraints, "_MAX_CPU_S", 0.5)
    # Where the start of a process takes long, a check does not become one that takes long.
    monkeypatch.setattr(constraints, "_LONG_S", 60)
    made = ConstraintChecks()
    yield made
    made.close()
    await asyncio.gather(*(checker.ended() for checker in made.started))


async def test_a_constraint_is_checked_once(checks: ConstraintChecks) -> None:
    await checks.check(None, model())
    assert not checks.started
    await checks.check(Constraint(regex="a+"), model())
    with pytest.raises(InvalidArgument, match=r"regex: at 1\(8\).*unclosed group") as refused:
        await checks.check(Constraint(regex="a("), model())
    assert refused.value.field == "constraint"
    [checker] = checks.started
    assert checker.is_usable
    checker.kill()
    await checker.ended()
    # What was found is known without a process.
    await checks.check(Constraint(regex="a+"), model())
    with pytest.raises(InvalidArgument, match="unclosed group"):
        await checks.check(Constraint(regex="a("), model())
    assert len(checks.started) == 1
    # One that has ended is replaced.
    await checks.check(Constraint(regex="b+"), model())
    assert len(checks.started) == 2


async def test_what_takes_too_long_is_refused_and_holds_nothing_up(
    checks: ConstraintChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checks.check(Constraint(regex="a"), model())
    monkeypatch.setattr(constraints, "_LONG_S", 0.1)
    slow = asyncio.create_task(checks.check(ENDLESS, model()))
    async with asyncio.timeout(20):
        pid = await busy_checker(checks)
        # It stands still meanwhile: beside a busy machine it could reach its bound before the others are checked.
        os.kill(pid, signal.SIGSTOP)
        for number in range(5):
            await checks.check(Constraint(regex=f"a{number}"), model())
        assert not slow.done()
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(InvalidArgument, match=r"takes more than 0\.5 s or too much memory to compile"):
            await slow
        await checks.check(Constraint(regex="b"), model())


async def test_one_that_was_given_no_time_is_not_to_blame(
    checks: ConstraintChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checks.check(Constraint(regex="a"), model())
    monkeypatch.setattr(constraints, "_LONG_S", 0.1)
    asked = asyncio.create_task(checks.check(ENDLESS, model()))
    async with asyncio.timeout(30):
        os.kill(await busy_checker(checks), signal.SIGALRM)
        with pytest.raises(Overloaded, match="no time"):
            await asked
        with pytest.raises(InvalidArgument, match=r"takes more than 0\.5 s"):
            await checks.check(ENDLESS, model())


async def test_one_that_takes_long_runs_last(checks: ConstraintChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    await checks.check(Constraint(regex="first"), model())
    monkeypatch.setattr(constraints, "_LONG_S", 0.0)
    await checks.check(Constraint(regex="a"), model())
    await checks.check(Constraint(regex="b"), model())
    first, second = checks.started
    assert not first.is_usable and second is not first


async def test_a_long_check_hands_its_turn_on_once_it_may(
    checks: ConstraintChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that take long run beside each other; when the first ends, the second lets others by, as the first did."""
    await checks.check(Constraint(regex="first"), model())
    monkeypatch.setattr(constraints, "_LONG_S", 0.1)
    endless = [Constraint(json_schema=json.dumps({"multipleOf": 99999989 + 2 * n, "type": "integer"})) for n in (0, 1)]
    first, second = (asyncio.create_task(checks.check(item, model())) for item in endless)
    async with asyncio.timeout(30):
        while len(checks.started) < 2:
            await asyncio.sleep(0.01)
        # It stands still until the first has ended, and others have been checked.
        pid = checks.started[1]._process.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(InvalidArgument, match=r"takes more than 0\.5 s"):
            await first
        for number in range(3):
            await checks.check(Constraint(regex=f"a{number}"), model())
        assert not second.done()
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(InvalidArgument, match=r"takes more than 0\.5 s"):
            await second


async def test_another_tokenizer_has_a_process_of_its_own(checks: ConstraintChecks) -> None:
    await checks.check(Constraint(regex="a"), model())
    await checks.check(Constraint(regex="a"), model("other"))
    assert [checker.fingerprint for checker in checks.started] == ["bytes", "other"]
    await checks.started[0].ended()


async def test_targets_that_take_none_are_named(checks: ConstraintChecks) -> None:
    for unfit in (model(takes_constraints=False), replace(model(), tokenizer=None)):
        with pytest.raises(InvalidArgument, match="the targets take no constraints"):
            await checks.check(Constraint(regex="a"), unfit)


async def test_the_queue_and_the_wait_are_bounded(checks: ConstraintChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    # The two that run end when their callers leave, not before: the third would have its turn then.
    monkeypatch.setattr(constraints, "_MAX_CPU_S", 60)
    monkeypatch.setattr(constraints, "_MAX_QUEUED", 1)
    monkeypatch.setattr(constraints, "_MAX_WAIT_S", 0.5)
    monkeypatch.setattr(constraints, "_LONG_S", 0.1)
    endless = [
        Constraint(json_schema=json.dumps({"multipleOf": 99999989 + 2 * n, "type": "integer"})) for n in range(4)
    ]
    running = [asyncio.create_task(checks.check(item, model())) for item in endless[:2]]
    # The second one runs beside the first once that takes long.
    async with asyncio.timeout(20):
        while len(checks.started) < 2:
            await asyncio.sleep(0.02)
    waiting = asyncio.create_task(checks.check(endless[2], model()))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 constraints wait"):
        await checks.check(endless[3], model())
    with pytest.raises(Overloaded, match="no process"):
        await waiting
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    # What a caller that left was having checked is ended with it, or was never begun.
    async with asyncio.timeout(20):
        while checkers():
            await asyncio.sleep(0.02)


async def busy_checker(checks: ConstraintChecks) -> int:
    """Return the only process that checks constraints, once it has been given one."""
    [pid] = checkers()
    while checks._idle or ") R " not in Path(f"/proc/{pid}/stat").read_text():
        await asyncio.sleep(0.01)
    return pid


def checkers() -> list[int]:
    """Return the processes that check constraints, of those that this one has started."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in content(path).split()]
    return [
        int(pid) for pid in children if b"outrider.grammar.checking" in content(Path("/proc", pid.decode(), "cmdline"))
    ]


def content(path: Path) -> bytes:
    """Return the content of a file of /proc; nothing once its thread or process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_a_caller_that_leaves_while_a_process_starts_leaves_none_behind(checks: ConstraintChecks) -> None:
    async with asyncio.timeout(20):
        while checkers():
            await asyncio.sleep(0.02)
    for number in range(3):
        check = asyncio.create_task(checks.check(Constraint(regex=f"leave{number}"), model()))
        while not checkers():
            await asyncio.sleep(0.001)
        check.cancel()
        with pytest.raises(asyncio.CancelledError):
            await check
        async with asyncio.timeout(20):
            while checkers():
                await asyncio.sleep(0.02)
    await checks.check(Constraint(regex="stay"), model())


async def test_callers_with_the_same_constraint_share_a_check(checks: ConstraintChecks) -> None:
    """A burst of the same requests, as after a restart; some of the callers leave."""
    burst = [asyncio.create_task(checks.check(Constraint(regex="burst"), model())) for _ in range(200)]
    await asyncio.sleep(0)
    for caller in burst[::3]:
        caller.cancel()
    found = await asyncio.gather(*burst, return_exceptions=True)
    assert all(isinstance(item, asyncio.CancelledError) for item in found[::3])
    assert [item for place, item in enumerate(found) if place % 3] == [None] * sum(
        place % 3 > 0 for place in range(200)
    )
    assert len(checks.started) == 1


async def test_a_tokenizer_that_llguidance_cannot_use_is_named(checks: ConstraintChecks) -> None:
    unfit = replace(model("unfit"), vocabulary_size=9)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="tokenizer cannot be used for constraints"):
            await checks.check(Constraint(regex="a"), unfit)
    assert not checks.started


def constrained(constraint: Constraint, **more: object) -> pb.GenerateRequest:
    request = asking(**more)  # type: ignore[arg-type]
    request.parameters.MergeFrom(wire.given_to_message(SamplingParameters(constraint=constraint)))
    return request


def with_text(target: ScriptedTarget) -> None:
    """Give the scripted target a tokenizer, whose end-of-text token is not one that it writes."""
    target.files = dict(byte_tokenizer().files)
    target.info.grammar_library = "llguidance 1"


async def test_a_wrong_constraint_leaves_nothing_behind(session_store_url: str, target: ScriptedTarget) -> None:
    with_text(target)
    async with orchestrating(session_store_url, (target,)) as running:
        with pytest.raises(InvalidArgument, match="unclosed group"):
            await running.events(constrained(Constraint(regex="a("), session_id="wrong-constraint"))
        with pytest.raises(SessionNotFound):
            await running.session("wrong-constraint")
        await running.events(constrained(Constraint(regex="a+"), session_id="right-constraint"))
        [opened] = [frame.open for frame in target.frames if frame.HasField("open")]
        assert opened.parameters.constraint.regex == "a+" and opened.speculation.forced_tokens
        events = await running.events(constrained(Constraint(regex="b+"), plain=True))
        assert events[-1].HasField("finished") and not target.frames[-1].open.speculation.forced_tokens


async def test_targets_without_the_library_refuse_by_name(session_store_url: str, target: ScriptedTarget) -> None:
    with_text(target)
    target.info.grammar_library = ""
    async with orchestrating(session_store_url, (target,)) as running:
        with pytest.raises(InvalidArgument, match="the targets take no constraints"):
            await running.events(constrained(Constraint(regex="a")))


async def test_a_constraint_that_fails_is_told_the_client_at_once(
    session_store_url: str, target: ScriptedTarget
) -> None:
    with_text(target)
    target.refusals.append(ConstraintFailed("no token that the constraint allows can follow the output"))
    async with orchestrating(session_store_url, (target,)) as running:
        with pytest.raises(ConstraintFailed, match="no token"):
            await running.events(constrained(Constraint(regex="a")))
        assert sum(frame.HasField("open") for frame in target.frames) == 1


async def test_a_request_is_the_same_only_with_the_same_constraint(
    session_store_url: str, target: ScriptedTarget
) -> None:
    with_text(target)
    async with orchestrating(session_store_url, (target,)) as running:
        first = await running.events(constrained(Constraint(regex="a+"), request_id="same-constraint"))
        again = await running.events(constrained(Constraint(regex="a+"), request_id="same-constraint"))
        assert [event.delta.token_ids for event in again if event.HasField("delta")]
        assert first[-1].finished.num_output_tokens == again[-1].finished.num_output_tokens
        with pytest.raises(DuplicateRequest):
            await running.events(constrained(Constraint(regex="b+"), request_id="same-constraint"))
