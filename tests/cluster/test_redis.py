"""A Redis pod that is restarted, and one that refuses: streams go on, or end with the reason."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from outrider.errors import Unavailable
from tests.cluster.deployed import Deployed
from tests.cluster.streams import strike_streams
from tests.faults.history import check, read_log, watch
from tests.faults.scene import asking, learn, plain

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_POD = "redis-sessions-0"
_NUM_STREAMS = 8
_PASSWORD = "of-nobody"
_NOTICED_S = 90.0


@dataclass(frozen=True)
class Refusal:
    """What makes a Redis refuse, what ends that, and what is to be said of it."""

    begin: tuple[tuple[str, ...], ...]
    end: tuple[tuple[str, ...], ...]
    problem: str


REFUSALS = {
    # Connections that have shown no password before keep their rights.
    "password": Refusal(
        (("config", "set", "requirepass", _PASSWORD), ("-a", _PASSWORD, "client", "kill", "type", "normal")),
        (("-a", _PASSWORD, "config", "set", "requirepass", ""),),
        "requires a password",
    ),
    "read-only": Refusal((("replicaof", "127.0.0.1", "1"),), (("replicaof", "no", "one"),), "is a replica"),
    "refuses": Refusal(
        (("config", "set", "protected-mode", "yes"), ("client", "kill", "type", "normal")),
        (("config", "set", "protected-mode", "no"),),
        "protected mode",
    ),
}


async def test_streams_go_on_after_a_restart_of_redis(
    markov: Deployed, record_property: Callable[[str, object], None]
) -> None:
    await markov.in_thread(markov.scale_to_two)
    (pod,) = await markov.in_thread(markov.pods, "redis-sessions")

    async def strike() -> None:
        await markov.in_thread(markov.delete, pod)

    async with markov.client() as client:
        streams = await strike_streams(client, _NUM_STREAMS, strike)
    record_property("failed_requests", streams.num_failed)
    record_property("num_tokens", streams.num_tokens)
    record_property("next_token_s", round(streams.next_token_s, 2))
    (new,) = await markov.in_thread(markov.pods, "redis-sessions")
    assert new["metadata"]["uid"] != pod["metadata"]["uid"]


@pytest.mark.parametrize("how", REFUSALS)
async def test_a_redis_that_refuses_ends_readiness_and_is_named(
    markov: Deployed, how: str, record_property: Callable[[str, object], None]
) -> None:
    refusal, run = REFUSALS[how], markov.in_thread
    await run(markov.scale_to_two)
    orchestrators = await run(markov.pods, "orchestrator")
    request = asking(seed=77)

    def set_state(commands: tuple[tuple[str, ...], ...]) -> None:
        for command in commands:
            # It ends the connection that it came by, too.
            markov.exec(_POD, "valkey-cli", *command, is_checked="kill" not in command)

    def until_ready_are(num: int) -> float:
        return markov.node.until(
            lambda: len(markov.ready_pods("orchestrator")) == num, f"{num} orchestrators Ready", within_s=_NOTICED_S
        )

    async with markov.client() as client:
        await learn(client, request)
    await run(set_state, refusal.begin)
    try:
        record_property("not_ready_s", round(await run(until_ready_are, 0), 1))
        address = f"{orchestrators[0]['status']['podIP']}:50051"
        async with markov.client(address, max_attempts=1) as direct:
            record = await watch(direct, request, timeout_s=20)
        assert isinstance(record.error, Unavailable) and refusal.problem in str(record.error), record.error
        assert _PASSWORD not in str(record.error)
        for pod in orchestrators:
            log = await run(markov.logs, pod)
            assert refusal.problem in log and _PASSWORD not in log
    finally:
        await run(set_state, refusal.end)
    record_property("ready_again_s", round(await run(until_ready_are, 2), 1))
    now = await run(markov.pods, "orchestrator")
    names = [
        [(pod["metadata"]["name"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in pods]
        for pods in (orchestrators, now)
    ]
    assert names[0] == names[1], "no pod was restarted for it"
    async with asyncio.timeout(60), markov.client() as client:
        record = await watch(client, request)
        assert record.error is None, record.error
        await read_log(client, record)
    check([record], plain)
