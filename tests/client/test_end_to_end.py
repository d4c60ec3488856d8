"""The command line and the client against whole stacks of real services."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from outrider.client import (
    Delta,
    DraftOptions,
    Generation,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.errors import InvalidArgument, SessionNotFound
from outrider.parameters import FinishReason, SamplingParameters

MODEL = "markov:vocabulary=16"
OUTRIDER = [sys.executable, "-c", "from outrider.cli.main import main; main()"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def outrider(*arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OUTRIDER, *arguments], input=input, capture_output=True, text=True, timeout=120)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    """Two orchestrators over one target and two kinds of drafts."""
    drafts = (DraftOptions(), DraftOptions("model", model=f"{MODEL},noise=0.3"))
    # Passes that take time: beside a target that takes none, a draft may not have answered before all is said.
    options = StackOptions(model=f"{MODEL},step_s=0.005", drafts=drafts, num_orchestrators=2, target_threads=1)
    async with LocalStack(options) as running:
        yield running


def request(**values: object) -> GenerationRequest:
    parameters = SamplingParameters(seed=11, max_tokens=48)
    return GenerationRequest(**{"token_ids": PROMPT, "parameters": parameters, **values})  # type: ignore[arg-type]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_tokens_do_not_depend_on_the_draft(stack: LocalStack) -> None:
    async with stack.client() as client:
        plain = await client.complete(request(speculation=Speculation(disabled=True)))
        for drafter in ("ngram", "model"):
            speculative = await client.complete(request(speculation=Speculation(drafter=drafter)))
            assert speculative.token_ids == plain.token_ids
            assert speculative.finish_reason is FinishReason.LENGTH
        # Random tokens repeat nothing that could be looked up; the model draft is the last of the two. Whether what it
        # proposes is waited for is the controller's business.
        assert speculative.statistics.num_proposed_nodes > 0
    assert len(plain.token_ids) == 48
    assert plain.statistics.num_draft_tokens == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_repeated_under_its_id_gives_what_it_gave(stack: LocalStack) -> None:
    async with stack.client() as client:
        first = await client.complete(request(request_id="once"))
        again = await client.complete(request(request_id="once"))
        rest = await client.complete(request(request_id="once", resume_offset=20))
    assert again.token_ids == first.token_ids
    assert rest.token_ids == first.token_ids[20:]


@pytest.mark.asyncio(loop_scope="module")
async def test_refusals_name_their_field(stack: LocalStack) -> None:
    async with stack.client() as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.complete(GenerationRequest(token_ids=[99]))
        assert "token_ids" in caught.value.field
        with pytest.raises(SessionNotFound):
            await client.get_session("nobody")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_command_line_generates_and_informs(stack: LocalStack) -> None:
    where = ("--address", stack.addresses[0])
    done = outrider("generate", "3 1 4", "--token-ids", *where, "--seed", "5", "--max-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"text", "token_ids", "finish_reason", "session_id", "seed", "stats"}
    assert (len(answer["token_ids"]), answer["finish_reason"], answer["seed"]) == (8, "length", 5)
    workers = json.loads(outrider("info", *where, "--json").stdout)["workers"]
    assert sorted(worker["info"]["role"] for worker in workers) == ["WORKER_ROLE_DRAFT"] * 2 + ["WORKER_ROLE_TARGET"]
    assert all(worker["in_rotation"] and worker["load"] for worker in workers)


def test_a_client_survives_the_death_of_its_orchestrator() -> None:
    options = StackOptions(
        model=f"{MODEL},step_s=0.005", drafts=(DraftOptions(),), num_orchestrators=2, target_threads=1
    )

    async def run() -> tuple[Generation, Generation]:
        async with LocalStack(options) as stack, stack.client() as client:
            whole = await client.complete(request())
            broken = Generation()
            async for event in OutriderClient(stack.addresses).generate(request()):
                broken.add(event)
                if isinstance(event, Delta) and event.offset < 10 <= event.offset + len(event.token_ids):
                    stack.orchestrators[0].kill()
            return whole, broken

    whole, broken = asyncio.run(run())
    assert broken.token_ids == whole.token_ids
