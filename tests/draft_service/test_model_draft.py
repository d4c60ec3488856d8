"""A model drafter behind the real servicer and real sockets."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.serving.channel import open_channel, wait_connected
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.draft_service.conftest import (
    TIMEOUT_S,
    DraftClient,
    advance_frame,
    draft,
    open_frame,
    proposal,
    running_draft,
    terms,
)
from tests.drafters.models import MARKOV, RecordedModel, markov, model_drafter

LONG = SamplingParameters(seed=5, max_tokens=10_000)
SLOW = f"{MARKOV},step_s=0.02"


def _alone(token_ids: list[int], num: int, rule: AcceptanceRule = AcceptanceRule.COUPLED) -> tuple[int, ...]:
    [drafted] = draft(model_drafter(), proposal(token_ids, num, given=terms(LONG, rule)))
    return drafted


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
async def test_many_sessions_on_many_streams_draft_as_one_alone(rule: AcceptanceRule) -> None:
    async with running_draft(model_drafter(chunk=32)) as running:
        clients = [running.stream() for _ in range(3)]

        async def session(client: DraftClient, handle: int, name: str) -> None:
            tokens = [handle, 2, 3] * (1 + handle % 5)
            await client.send(open_frame(handle, name, parameters=LONG, rule=rule, prompt_len=1))
            await client.receive(handle)
            assert await client.drafted(handle, tokens) == _alone(tokens, 4, rule)
            more = [*_alone(tokens, 4, rule)[:2], 7]
            assert await client.drafted(handle, more, start=len(tokens)) == _alone([*tokens, *more], 4, rule)

        # One reader a stream: sessions of a stream take turns, streams run side by side.
        async def stream(number: int) -> None:
            for handle in range(4):
                await session(clients[number], handle, f"{number}-{handle}")

        await asyncio.gather(*map(stream, range(3)))
        load = await running.worker.GetLoad(worker_pb2.GetLoadRequest())
        assert load.kv_used_bytes > 0
        assert load.num_passes > 0


async def test_nodes_arrive_while_others_are_still_being_drafted() -> None:
    async with running_draft(model_drafter(markov(SLOW))) as running:
        client = running.stream()
        handle, _ = await client.open(parameters=LONG, prompt_len=1)
        await client.send(advance_frame(handle, [1, 2], num=5))
        parts = [(await client.receive(handle)).proposal for _ in range(5)]
        assert [part.first_node for part in parts] == [1, 2, 3, 4, 5]
        assert [len(part.nodes) for part in parts] == [1] * 5
        assert [node.parent for part in parts for node in part.nodes] == [0, 1, 2, 3, 4]
        assert [part.complete for part in parts] == [False] * 4 + [True]


async def test_a_newer_base_replaces_the_older_one() -> None:
    async with running_draft(model_drafter(markov(SLOW))) as running:
        client = running.stream()
        handle, _ = await client.open(parameters=LONG, prompt_len=1)
        await client.send(advance_frame(handle, [1, 2], num=16))
        assert (await client.receive(handle)).proposal.base.len == 2
        await client.send(advance_frame(handle, [9], start=2, num=3))
        frame = await client.receive(handle)
        while frame.proposal.base.len == 2:
            assert not frame.proposal.complete
            frame = await client.receive(handle)
        token_ids = [node.token_id for node in frame.proposal.nodes]
        token_ids += [node.token_id for _ in range(2) for node in (await client.receive(handle)).proposal.nodes]
        assert tuple(token_ids) == _alone([1, 2, 9], 3)


async def test_who_takes_a_session_over_ends_what_was_drafted_for_the_other() -> None:
    async with running_draft(model_drafter(markov(SLOW))) as running:
        old, new = running.stream(), running.stream()
        handle, _ = await old.open(parameters=LONG, prompt_len=1)
        await old.send(advance_frame(handle, [1, 2], num=16))
        await old.receive(handle)
        await new.open(fencing_token=2, parameters=LONG, prompt_len=1)
        frame = await old.receive(handle)
        while frame.WhichOneof("frame") == "proposal":
            frame = await old.receive(handle)
        assert frame.refusal.reason == "FENCED"


async def test_one_sessions_failure_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async with running_draft(model_drafter(RecordedModel(markov(), poison=13))) as running:
        client = running.stream()
        await client.send(*(open_frame(handle, str(handle), parameters=LONG, prompt_len=1) for handle in range(4)))
        prompts = [[1, 2], [3, 13], [5, 6], [7, 8]]
        await client.send(*(advance_frame(handle, prompt, num=1) for handle, prompt in enumerate(prompts)))
        for handle, prompt in enumerate(prompts):
            assert (await client.receive(handle)).WhichOneof("frame") == "opened"
            if handle == 1:
                refusal = await client.refusal(handle)
                assert (refusal.reason, refusal.message) == ("REQUEST_FAILED", "drafting failed for this session")
            else:
                assert tuple(node.token_id for node in await client.proposal(handle)) == _alone(prompt, 1)
        assert "a draft step failed" in caplog.text


async def test_another_tokenizer_is_refused_with_both_fingerprints() -> None:
    drafter = model_drafter()
    async with running_draft(drafter) as running:
        client = running.stream()
        _, refused = await client.open(tokenizer_fingerprint="0123")
        assert refused.refusal.reason == "TOKENIZER_MISMATCH"
        assert dict(refused.refusal.metadata) == {
            "draft_tokenizer_fingerprint": drafter.info.tokenizer_fingerprint,
            "target_tokenizer_fingerprint": "0123",
        }
        _, opened = await client.open(tokenizer_fingerprint=drafter.info.tokenizer_fingerprint)
        assert opened.WhichOneof("frame") == "opened"


async def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    async with running_draft(model_drafter()) as running:
        client = running.stream()
        for parameters in (
            SamplingParameters(seed=1, stop_token_ids=(24,)),
            SamplingParameters(seed=1, logit_bias={99: 1}),
        ):
            _, refused = await client.open(parameters=parameters)
            assert refused.refusal.metadata["field"] in ("stop_token_ids", "logit_bias")
        handle, _ = await client.open(parameters=LONG, prompt_len=1)
        await client.send(advance_frame(handle, [1, 24]))
        assert (await client.refusal(handle)).metadata["field"] == "span.token_ids"
        assert await client.drafted(handle, [1, 23]) == _alone([1, 23], 4)


@pytest.mark.parametrize(
    ("arguments", "without_torch"),
    [(["--drafter", "ngram"], True), (["--model", MARKOV], False)],
    ids=["ngram", "markov"],
)
async def test_the_process_starts_and_drains(arguments: list[str], without_torch: bool) -> None:
    program = "import runpy, sys; sys.modules['torch'] = None; " if without_torch else "import runpy; "
    program += "runpy.run_module('draft_service', run_name='__main__', alter_sys=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--replica", "draft-7", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = json.loads(await asyncio.to_thread(process.stdout.readline))["address"]
        async with open_channel(address) as channel:
            await wait_connected(channel, address, TIMEOUT_S)
            info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
            assert info.replica == "draft-7"
        os.kill(process.pid, signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()
