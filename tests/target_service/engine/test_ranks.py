"""A target split among two processes: the text of one, verified proposals included, and an end that is everyone's."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from outrider.parameters import SamplingParameters
from outrider.tokens import Base, NodeKind, ProposalNode
from outrider.v1 import worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub
from tests.lm.models import CONFIGS, save_model
from tests.target_service.conversation import Caller

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 30, 12, 41, 3, 3, 17]
REQUESTS = [
    SamplingParameters(temperature=0, max_tokens=40, ignore_eos=True, seed=1),
    SamplingParameters(temperature=1, max_tokens=40, ignore_eos=True, seed=2),
    SamplingParameters(temperature=0.8, top_k=20, max_tokens=40, ignore_eos=True, seed=3),
]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@contextmanager
def started(folder: str, directory: Path, *runner: str) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Starts a target, by itself or under a runner; ends whatever is left of it."""
    ready = directory / "address"
    environment = {**os.environ, "OUTRIDER_MODEL": folder, "OUTRIDER_READY_FILE": str(ready), "OUTRIDER_COMPILE": "no"}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *runner, "-m", "target_service"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, ready
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@asynccontextmanager
async def connected(process: "subprocess.Popen[bytes]", ready: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with asyncio.timeout(90):
        while not ready.exists():
            assert process.poll() is None, (ready.parent / "log").read_text()
            await asyncio.sleep(0.05)
    async with grpc.aio.insecure_channel(ready.read_text()) as channel:
        yield channel


async def outputs(channel: grpc.aio.Channel) -> list[list[int]]:
    """Returns what some sessions at once output, and one that is sent proposals, right and wrong ones."""
    caller = Caller(channel)
    plain = await asyncio.gather(
        *(
            caller.plain(handle, [*PROMPT, handle], parameters, stop_token_ids=())
            for handle, parameters in enumerate(REQUESTS, start=1)
        )
    )
    speculated = await with_proposals(caller, [*PROMPT, 1], plain[0])
    assert speculated == plain[0]
    await caller.end()
    return plain


async def with_proposals(caller: Caller, prompt: list[int], known: list[int]) -> list[int]:
    handle, output = 9, list[int]()
    await caller.open(handle, prompt, REQUESTS[0], num_speculative_tokens=3, stop_token_ids=())
    await caller.span(handle, 0, prompt)
    async for verdict in caller.verdicts(handle):
        output += verdict.token_ids
        ahead = known[len(output) : len(output) + 3]
        if len(output) % 5 == 0:
            ahead = [63 - token_id for token_id in ahead]
        base = Base(len(prompt) + len(output), 1)
        nodes = [ProposalNode(number, token_id, NodeKind.GUESSED) for number, token_id in enumerate(ahead)]
        await caller.propose(handle, base, nodes)
    return output


async def info(channel: grpc.aio.Channel) -> worker_pb2.GetInfoResponse:
    return await WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pids: list[int], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < give_up, "processes are left"
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(CONFIGS["llama"], tmp_path_factory.mktemp("model"))


async def test_two_ranks_write_what_one_writes_and_end_together(folder: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with started(folder, tmp_path / "one") as one, started(folder, tmp_path / "two", *TORCHRUN) as two:
        async with connected(*one) as channel:
            expected, alone = await outputs(channel), await info(channel)
        async with connected(*two) as channel:
            assert await outputs(channel) == expected
            together = await info(channel)
        assert "ranks-2" in together.numerics
        assert "ranks" not in alone.numerics
        assert together.model_fingerprint == alone.model_fingerprint
        agent, ranks = two[0], children(two[0].pid)
        assert len(ranks) == 2
        agent.terminate()
        await gone([agent.pid, *ranks], 40)
    log = (tmp_path / "two" / "log").read_text()
    assert '"message": "stopped"' in log, "the first rank drained"


async def test_a_rank_that_dies_takes_the_others_along(folder: str, tmp_path: Path) -> None:
    with started(folder, tmp_path, *TORCHRUN) as (agent, ready):
        async with connected(agent, ready) as channel:
            await info(channel)
        ranks = children(agent.pid)
        os.kill(ranks[1], signal.SIGKILL)
        await gone([agent.pid, *ranks], 60)
        assert agent.wait() != 0
