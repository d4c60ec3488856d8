"""A target on vLLM: its text against transformers', spans, resumption, windows, and vLLM's KV cache."""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from outrider.errors import Unavailable
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import Base, NodeKind, ProposalNode
from outrider.v1 import target_pb2 as pb
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.lm.models import SMALL, save_model
from tests.target_service.conversation import Caller
from tests.vllm.environment import ENGINE_ARGS, ENVIRONMENT, PYTHON, needs_vllm, save_tiny

pytestmark = [*needs_vllm, pytest.mark.timeout(600)]

TERMS: Any = {"rule": AcceptanceRule.ENGINE, "stop_token_ids": ()}
PROMPT = [1, 7, 30, 12, 44, 5]
LONG = [(7 * place + place * place) % 64 for place in range(200)]
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 1.5}
NUM = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@asynccontextmanager
async def served(folder: str, directory: Path, **settings: str) -> AsyncIterator[ServiceProcess]:
    """A target on vLLM."""
    environment = {
        **ENVIRONMENT,
        "OUTRIDER_MODEL": folder,
        "OUTRIDER_ADDRESS": "127.0.0.1:0",
        "OUTRIDER_METRICS_ADDRESS": "127.0.0.1:0",
        **settings,
    }
    running = ServiceProcess(ProcessSpec("target", "target_service", environment, interpreter=PYTHON), directory)
    running.start()
    try:
        await running.wait_ready(240)
        yield running
    finally:
        running.kill()


@asynccontextmanager
async def connected(process: ServiceProcess) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(process.address) as channel:
        found = Caller(channel)
        yield found
        await found.end()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def process(folder: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceProcess]:
    async with served(folder, tmp_path_factory.mktemp("target")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def caller(process: ServiceProcess) -> AsyncIterator[Caller]:
    async with connected(process) as found:
        yield found


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompt: Sequence[int], num: int, prompt_len: int = 0, **penalties: float
) -> list[int]:
    """Returns transformers' likeliest tokens, with vLLM's penalties of the output."""
    tokens, prompt_len = list(prompt), len(prompt)
    for _ in range(num):
        row = model(torch.tensor([tokens])).logits[0, -1].clone()
        for token_id in set(tokens[prompt_len:]):
            count = tokens[prompt_len:].count(token_id)
            row[token_id] -= penalties.get("presence_penalty", 0) + count * penalties.get("frequency_penalty", 0)
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


async def load(caller: Caller) -> worker_pb2.GetLoadResponse:
    return await worker_pb2_grpc.WorkerServiceStub(caller.channel).GetLoad(worker_pb2.GetLoadRequest())


async def output(caller: Caller, handle: int) -> list[int]:
    return [token_id async for verdict in caller.verdicts(handle) for token_id in verdict.token_ids]


async def test_it_states_its_rule_its_numerics_and_its_model(caller: Caller, folder: str) -> None:
    info = await worker_pb2_grpc.WorkerServiceStub(caller.channel).GetInfo(worker_pb2.GetInfoRequest())
    assert list(info.acceptance_rules) == ["engine"]
    assert info.numerics.startswith("cpu float32 vllm-0.32")
    assert info.numerics.endswith(" varying")
    assert (info.model, info.vocabulary_size, info.max_session_len) == (folder, 64, 2048)
    assert info.weights_fingerprint
    assert info.kv_budget_bytes > 1 << 28


@pytest.mark.parametrize("penalties", [{}, PENALTIES])
async def test_greedy_text_is_transformers(caller: Caller, model: PreTrainedModel, penalties: dict[str, float]) -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=NUM, **penalties)
    for handle, prompt in ((1, PROMPT), (2, LONG)):
        assert await caller.plain(handle, prompt, parameters, **TERMS) == greedy(model, prompt, NUM, **penalties)


async def test_proposals_change_no_token_and_are_accepted(caller: Caller, model: PreTrainedModel) -> None:
    truth = greedy(model, PROMPT, NUM, **PENALTIES)
    parameters = SamplingParameters(temperature=0, max_tokens=NUM, **PENALTIES)
    for handle, wrong_at in ((1, None), (2, 2)):
        await caller.open(handle, PROMPT, parameters, num_speculative_tokens=5, session=f"p{handle}", **TERMS)
        await caller.span(handle, 0, PROMPT)
        text: list[int] = []
        num_accepted = num_rounds = 0
        async for verdict in caller.verdicts(handle):
            text += verdict.token_ids
            num_accepted += verdict.num_accepted_tokens
            num_rounds += 1
            line = truth[len(text) : len(text) + 4]
            if wrong_at is not None and len(line) > wrong_at:
                line[wrong_at] = (line[wrong_at] + 1) % 64
            nodes = [ProposalNode(place, token_id, NodeKind.GUESSED) for place, token_id in enumerate(line)]
            await caller.propose(handle, Base(len(PROMPT) + len(text), 1), nodes)
        await caller.send(handle, close=pb.VerifyClose(committed_len=len(PROMPT) + len(text)))
        assert text == truth
        assert num_accepted >= (NUM - num_rounds if wrong_at is None else NUM // 3)


@pytest.mark.parametrize("at", [1, 6, 17])
async def test_penalties_go_on_counting_when_a_request_resumes(caller: Caller, model: PreTrainedModel, at: int) -> None:
    truth = greedy(model, PROMPT, NUM, **PENALTIES)
    text = [*PROMPT, *truth[:at]]
    assert at < 6 or greedy(model, text, NUM - at, **PENALTIES) != truth[at:], "it matters which tokens are output"
    parameters = SamplingParameters(temperature=0, max_tokens=NUM, **PENALTIES)
    await caller.open(1, text, parameters, session=f"r{at}", prompt_len=len(PROMPT), **TERMS)
    await caller.span(1, 0, text)
    assert await output(caller, 1) == truth[at:]
    await caller.send(1, close=pb.VerifyClose(committed_len=len(PROMPT) + NUM))


async def test_a_span_that_truncates_continues_the_new_text(caller: Caller, model: PreTrainedModel) -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=NUM)
    await caller.open(1, LONG, parameters, session="t", window=6, **TERMS)
    await caller.span(1, 0, LONG)
    first: list[int] = []
    while len(first) < 6:
        first += (await caller.receive(1)).verdict.token_ids
    assert first == greedy(model, LONG, 6)
    other = [*LONG[:150], *([9] * 50)]
    before = await load(caller)
    await caller.span(1, 150, other[150:])
    second: list[int] = []
    while len(second) < 6:
        second += (await caller.receive(1)).verdict.token_ids
    assert second == greedy(model, other, 6)
    after = await load(caller)
    assert after.num_prefix_hit_tokens - before.num_prefix_hit_tokens == 128, "whole blocks of 32 before the change"
    await caller.send(1, close=pb.VerifyClose(committed_len=len(LONG)))


async def test_a_closed_window_runs_no_step_and_an_end_frees_memory(caller: Caller, model: PreTrainedModel) -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=NUM)
    await caller.open(1, PROMPT, parameters, session="w", window=4, **TERMS)
    await caller.span(1, 0, PROMPT)
    text: list[int] = []
    while len(text) < 4:
        text += (await caller.receive(1)).verdict.token_ids
    before = await load(caller)
    await caller.plain(2, PROMPT, SamplingParameters(temperature=0, max_tokens=3), session="x", **TERMS)
    after = await load(caller)
    assert after.num_passes - before.num_passes == 3
    assert after.kv_used_bytes > 0
    assert caller.num_waiting(1) == 0
    await caller.send(1, window=pb.VerifyWindow(committed_len=10, window_end=12))
    while len(text) < 6:
        text += (await caller.receive(1)).verdict.token_ids
    assert text == greedy(model, PROMPT, 6)
    await caller.send(1, close=pb.VerifyClose(committed_len=12))
    async with asyncio.timeout(10):
        while (await load(caller)).kv_used_bytes:
            await asyncio.sleep(0.01)


async def test_tenants_share_no_prefix_cache(caller: Caller) -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=2)
    prompt = [(5 * place + 3) % 64 for place in range(100)]
    hits = []
    for handle, salt in ((1, b"a"), (2, b"b"), (3, b"a")):
        before = (await load(caller)).num_prefix_hit_tokens
        await caller.plain(handle, prompt, parameters, session=f"s{handle}", cache_salt=salt, **TERMS)
        hits.append((await load(caller)).num_prefix_hit_tokens - before)
    assert hits == [0, 0, 96]


async def test_logprobs_are_those_of_the_raw_logits(caller: Caller, model: PreTrainedModel) -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=1, logprobs=3)
    await caller.open(1, PROMPT, parameters, session="l", **TERMS)
    await caller.span(1, 0, PROMPT)
    (verdict,) = [verdict async for verdict in caller.verdicts(1)]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).topk(3)
    (found,) = verdict.logprobs
    assert list(found.top_token_ids) == expected.indices.tolist()
    assert list(found.top_logprobs) == pytest.approx(expected.values.tolist(), abs=1e-4)
    assert (found.rank, found.logprob) == (1, found.top_logprobs[0])


async def test_a_round_adds_little_to_vllms_step(caller: Caller) -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=400)
    await caller.open(1, PROMPT, parameters, session="o", **TERMS)
    await caller.span(1, 0, PROMPT)
    arrivals, steps = [], []
    async for verdict in caller.verdicts(1):
        arrivals.append(perf_counter())
        steps.append(verdict.model_time_s)
    rest = [later - earlier - step_s for (earlier, later), step_s in zip(pairwise(arrivals), steps[1:], strict=True)]
    p50 = statistics.median(rest)
    print(
        f"outside vLLM's step of {statistics.median(steps) * 1e3:.2f} ms: {p50 * 1e3:.2f} ms, the median of {len(rest)}"
    )
    assert p50 <= 0.002


async def test_requests_beyond_the_kv_cache_are_preempted_and_lose_nothing(
    folder: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    arguments = {**json.loads(ENGINE_ARGS), "max_model_len": 256, "num_gpu_blocks_override": 14}
    environment = {"OUTRIDER_ENGINE_ARGS": json.dumps(arguments), "OUTRIDER_MAX_SESSIONS": "8"}
    async with served(folder, tmp_path, **environment) as process, connected(process) as caller:
        parameters = SamplingParameters(temperature=0, max_tokens=120, **PENALTIES)
        prompts = {handle: [*PROMPT, handle] for handle in range(1, 7)}
        texts = await asyncio.gather(
            *(caller.plain(handle, prompt, parameters, **TERMS) for handle, prompt in prompts.items())
        )
        assert texts == [greedy(model, prompt, 120, **PENALTIES) for prompt in prompts.values()]
        assert (await load(caller)).num_preemptions > 0
        assert (await load(caller)).kv_used_bytes == 0


async def test_vllms_own_metrics_stand_beside_the_targets(process: ServiceProcess) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://{process.metrics_address}/metrics")).text
    assert "vllm:num_requests_running" in text
    assert "outrider_target_pass_seconds_count" in text


async def test_a_model_that_vllm_cannot_run_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    narrow = save_model(LlamaConfig(**SMALL), tmp_path / "narrow")
    with pytest.raises(Unavailable, match=r"vLLM cannot run this model: .*head_dim=8"):
        async with served(narrow, tmp_path):
            pass


async def test_it_drains_on_sigterm(process: ServiceProcess) -> None:
    process.terminate()
    await process.wait_ended()
    assert process.exit_code == 0
