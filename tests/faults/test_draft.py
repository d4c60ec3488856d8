"""Faults 1 to 10: whatever happens to drafts, the text is the same, and no wait is long."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from outrider.client import OutriderClient, Speculation
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule
from outrider.v1 import tokens_pb2
from tests.faults.history import read_log, watch
from tests.faults.scene import Scene, asking, load_of
from tests.faults.stack import FaultStack, stop
from tests.orchestrator.scripted import ScriptedDraft

DRAFTED = tokens_pb2.NODE_KIND_DRAFTED
Posing = TypeVar("Posing", bound=ScriptedDraft)


async def test_fault_01_killed_mid_stream(scene: Scene) -> None:
    # More tokens than a window, so that the target is not done before the draft is missed.
    record = await scene.survive(scene.stack.drafts[0].kill, request=asking(num_tokens=300))
    assert record.longest_gap_s < 2
    assert record.statistics.num_fallbacks["draft_unavailable"] == 1


async def test_fault_02_stopped(scene: Scene) -> None:
    record = await scene.survive(lambda: stop(scene.stack.drafts[0]))
    assert record.longest_gap_s < 2


async def test_fault_03_slower_than_its_budget(scene: Scene) -> None:
    def strike() -> None:
        scene.stack.to_drafts[0].down.latency_s = 0.4

    record = await scene.survive(strike)
    assert record.longest_gap_s < 2


async def test_fault_04_blackholed(scene: Scene) -> None:
    record = await scene.survive(lambda: scene.stack.to_drafts[0].set_blackhole(up=True, down=True))
    assert record.longest_gap_s < 2


def node(parent: int, token_id: int, **more: Any) -> tokens_pb2.ProposalNode:
    return tokens_pb2.ProposalNode(parent=parent, token_id=token_id, kind=DRAFTED, **more)


def distribution(*probabilities: float) -> tokens_pb2.SparseDistribution:
    return tokens_pb2.SparseDistribution(token_ids=range(len(probabilities)), probabilities=probabilities)


GARBAGE = {
    "outside-the-vocabulary": [node(0, 16)],
    "far-outside": [node(0, 2**31)],
    "too-many-nodes": [node(number, 1) for number in range(500)],
    "no-such-parent": [node(7, 1)],
    "its-own-parent": [node(1, 1)],
    "nan": [node(0, 1, draft_distribution=distribution(math.nan, 0.5))],
    "not-normalised": [node(0, 1, draft_distribution=distribution(0.9, 0.9))],
    "negative": [node(0, 1, draft_distribution=distribution(-0.5, 1.5))],
    "not-what-was-drawn": [node(0, 5, draft_distribution=distribution(0.5, 0.5))],
    "no-distribution": [node(0, 1)],
    "nothing": [],
}


class Liar(ScriptedDraft):
    """A draft that says what it is told to, whatever it is asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.nodes: list[tokens_pb2.ProposalNode] = []
        self.old_len = 0
        self.old_fencing_token = 0
        self.num_lies = 0

    def _proposal(self, tokens: list[int], frame: Any) -> Any:
        answer = super()._proposal(tokens, frame)
        if answer.WhichOneof("frame") == "proposal":
            self.num_lies += 1
            del answer.proposal.nodes[:]
            answer.proposal.nodes.extend(self.nodes)
            answer.proposal.base.len -= min(self.old_len, answer.proposal.base.len)
            answer.proposal.base.fencing_token -= self.old_fencing_token
        return answer


@asynccontextmanager
async def lying(stack: FaultStack, draft: ScriptedDraft) -> AsyncIterator[OutriderClient]:
    """An orchestrator whose only draft is this one."""
    async with (
        draft,
        stack.another(OUTRIDER_DRAFTS=draft.address) as process,
        stack.client(process.address) as client,
    ):
        yield client


def posing(draft: Posing, tokenizer: str = "") -> Posing:
    """Has a scripted draft say that it fits the stack's targets."""
    draft.info.tokenizer_fingerprint = tokenizer
    draft.info.vocabulary_size = 16
    draft.info.acceptance_rules[:] = [rule.value for rule in REPLAYABLE_RULES]
    return draft


@pytest.mark.parametrize("rule", list(REPLAYABLE_RULES), ids=lambda rule: rule.value)
@pytest.mark.parametrize("kind", GARBAGE)
async def test_fault_05_answers_garbage(scene: Scene, kind: str, rule: AcceptanceRule, liar_client: Any) -> None:
    liar, client = liar_client
    liar.nodes, liar.num_lies = GARBAGE[kind], 0
    request = asking(seed=11, num_tokens=24, speculation=Speculation(acceptance_rule=rule))
    if rule is AcceptanceRule.COUPLED:
        await scene.survive(lambda: None, after=0, request=request, client=client)
    else:
        # The text follows no draft, so it is the log that it must equal.
        record = await watch(client, request, timeout_s=20)
        assert (record.num_terminal, len(record.token_ids)) == (1, 24)
        await read_log(scene.client, record)
        assert record.log == record.token_ids
    assert liar.num_lies > 0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def liar_client(shared_stack: FaultStack) -> AsyncIterator[tuple[Liar, OutriderClient]]:
    liar = posing(Liar("liar"))
    async with lying(shared_stack, liar) as client:
        yield liar, client


@pytest.mark.slow
@pytest.mark.parametrize("what", ["old_len", "old_fencing_token"])
async def test_fault_06_proposals_for_a_stale_base(scene: Scene, what: str) -> None:
    liar = posing(Liar("stale"))
    liar.nodes = [node(0, 1), node(1, 2)]
    setattr(liar, what, 3)
    async with lying(scene.stack, liar) as client:
        before = [await load_of(process) for process in scene.stack.targets]
        record = await scene.survive(lambda: None, after=0, client=client, request=asking(num_tokens=24))
        after = [await load_of(process) for process in scene.stack.targets]
    assert liar.num_lies > 0
    if what == "old_len":
        assert sum(load.num_stale_messages for load in after) > sum(load.num_stale_messages for load in before)
    else:
        # Those do not reach a target.
        assert record.statistics.num_fallbacks["stale_proposal"] > 0


@pytest.mark.slow
async def test_fault_07_restarts_under_the_same_name_with_an_empty_cache(scene: Scene) -> None:
    draft = scene.stack.drafts[0]

    async def strike() -> None:
        draft.kill()
        draft.restart()
        await draft.wait_ready(30)

    await scene.survive(strike, request=asking(num_tokens=300))
    # It is used again, without anybody having been told.
    generation = await scene.client.complete(asking(), timeout_s=20)
    assert generation.statistics.num_proposed_nodes > 0


async def test_fault_08_wrong_tokenizer(scene: Scene) -> None:
    async with lying(scene.stack, posing(ScriptedDraft("wrong"), tokenizer="another")) as client:
        await scene.survive(lambda: None, after=0, client=client)
        (worker,) = [item for item in (await client.list_models()).workers if item.info.replica == "wrong"]
        assert not worker.in_rotation
        assert "tokenizer" in worker.reason


async def test_fault_09_flapping(scene: Scene) -> None:
    flapping = asyncio.Event()

    async def flap() -> None:
        while not flapping.is_set():
            scene.stack.to_drafts[0].reset()
            await asyncio.sleep(0.03)

    task = asyncio.create_task(flap())
    try:
        record = await scene.survive(lambda: None, after=0)
    finally:
        flapping.set()
        await task
    assert record.longest_gap_s < 2


async def test_fault_10_none_configured(scene: Scene) -> None:
    async with scene.stack.another(OUTRIDER_DRAFTS="") as process, scene.stack.client(process.address) as client:
        await scene.survive(lambda: None, after=0, client=client)
