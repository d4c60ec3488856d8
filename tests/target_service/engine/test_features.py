"""Features over a real socket: who asks for them gets those of every cached position, once, and nobody else does."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.parameters import SamplingParameters
from outrider.tokens import Base, NodeKind, ProposalNode
from outrider.v1 import target_pb2 as pb
from tests.lm.models import CONFIGS, save_model
from tests.target_service.conversation import Caller, target
from tests.target_service.test_target import PROMPT

LAYERS = (1, 3)
GREEDY = SamplingParameters(temperature=0, max_tokens=24, ignore_eos=True)
WIDTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(CONFIGS["llama"], tmp_path_factory.mktemp("model"))


def expected(folder: str, token_ids: list[int]) -> torch.Tensor:
    states = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([token_ids]), output_hidden_states=True)
    return torch.cat([states.hidden_states[layer][0] for layer in LAYERS], dim=-1).detach()


def read(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, len(LAYERS) * WIDTH).float()


async def ask(caller: Caller, handle: int, start: int = 0, layers: tuple[int, ...] = LAYERS) -> None:
    caller.position_bytes = 2 * len(LAYERS) * WIDTH
    await caller.send(handle, features=pb.FeatureRequest(layers=layers, start=start))


def is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() < 0.02 * wanted.abs().max())


@pytest.mark.parametrize("late", [False, True], ids=["before-the-span", "after-it"])
async def test_all_of_a_generation(folder: str, *, late: bool) -> None:
    async with target(folder, adaptive_speculation=False) as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(2, PROMPT, GREEDY, stop_token_ids=(), session="s", window=1 if late else 10_000)
        if not late:
            await ask(caller, 2)
        await caller.span(2, 0, PROMPT)
        if late:
            verdict = (await caller.receive(2)).verdict
            assert list(verdict.token_ids) == truth[:1]
            await ask(caller, 2)
            await caller.send(2, window=pb.VerifyWindow(committed_len=5, window_end=1000))
        whole = [*PROMPT, *truth]
        data = await caller.features(2, len(whole) - 1)
        assert is_close(read(data), expected(folder, whole[:-1]))
        assert engine.load.feature_bytes == len(data)


async def test_accepted_branches_and_what_is_sent_again(folder: str) -> None:
    async with target(folder, adaptive_speculation=False) as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(2, PROMPT, GREEDY, stop_token_ids=(), num_speculative_tokens=3, window=12)
        await ask(caller, 2)
        await caller.span(2, 0, PROMPT)
        data, output, num_accepted = b"", [], 0
        while len(output) < 12:
            frame = await caller.receive(2)
            if frame.WhichOneof("frame") == "features":
                assert frame.features.start * caller.position_bytes == len(data)
                data += frame.features.data
                continue
            # Features of what a verdict keeps come before it.
            output += frame.verdict.token_ids
            num_accepted += frame.verdict.num_accepted_tokens
            assert len(data) == (len(PROMPT) + len(output) - 1) * caller.position_bytes
            following = truth[len(output) : len(output) + 2]
            wrong = ProposalNode(0, (following[0] + 1) % 64, NodeKind.GUESSED)
            right = [ProposalNode(2 * place, token_id, NodeKind.GUESSED) for place, token_id in enumerate(following)]
            await caller.propose(2, Base(len(PROMPT) + len(output), 1), [wrong, *right])
        assert output == truth[:12] and num_accepted > 4
        whole = [*PROMPT, *output]
        assert is_close(read(data), expected(folder, whole[:-1]))
        await ask(caller, 2, start=3)
        frame = await caller.receive(2)
        assert frame.features.start == 3
        assert frame.features.data == data[3 * caller.position_bytes :]


async def test_a_long_prompt_comes_in_parts(folder: str) -> None:
    prompt = [3 + 7 * index % 60 for index in range(1500)]
    async with target(folder, adaptive_speculation=False) as (_, caller):
        await caller.open(1, prompt, GREEDY, stop_token_ids=())
        await ask(caller, 1)
        await caller.span(1, 0, prompt)
        data = await caller.features(1, len(prompt))
        assert is_close(read(data)[: len(prompt)], expected(folder, prompt))


async def test_layers_that_are_not_there_cost_the_features_only(folder: str) -> None:
    async with target(folder) as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(2, PROMPT, GREEDY, stop_token_ids=())
        await ask(caller, 2, layers=(1, 99))
        await caller.span(2, 0, PROMPT)
        assert [token_id async for verdict in caller.verdicts(2) for token_id in verdict.token_ids] == truth
        assert engine.load.feature_bytes == 0


async def test_a_target_without_features_goes_on() -> None:
    async with target() as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY)
        await caller.open(2, PROMPT, GREEDY)
        await ask(caller, 2)
        await caller.span(2, 0, PROMPT)
        assert [token_id async for verdict in caller.verdicts(2) for token_id in verdict.token_ids] == truth
        assert engine.load.feature_bytes == 0
