"""Bad input through the served API: one clear error that names the field, and the stack lives on."""

import math
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from outrider import wire
from outrider.client import GenerationRequest, LocalStack, Speculation
from outrider.errors import InvalidArgument, OutriderError, RequestNotFound, SessionNotFound
from outrider.parameters import SamplingParameters
from outrider.serving.status import error_from_rpc
from outrider.v1 import draft_pb2, draft_pb2_grpc, tokens_pb2, worker_pb2
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from outrider.v1.worker_pb2_grpc import WorkerServiceStub
from tests.served.stacks import OTHER_TOKENIZER

MAX_LEN = 32768
"""Longest session of a target by default."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stub(shared_stack: LocalStack) -> AsyncIterator[GenerationServiceStub]:
    async with grpc.aio.insecure_channel(shared_stack.addresses[0]) as channel:
        yield GenerationServiceStub(channel)


async def _error(stub: GenerationServiceStub, request: pb.GenerateRequest) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request, timeout=30):
            pass
    return error_from_rpc(caught.value)


def _asked(**changes: object) -> pb.GenerateRequest:
    fields = {"token_ids": pb.TokenIds(token_ids=[1, 2]), **changes}
    return pb.GenerateRequest(**fields)  # type: ignore[arg-type]


def _with(**parameters: object) -> pb.GenerateRequest:
    return _asked(parameters=tokens_pb2.SamplingParameters(**parameters))  # type: ignore[arg-type]


BAD: list[tuple[pb.GenerateRequest, str]] = [
    (pb.GenerateRequest(), "prompt"),
    (_asked(token_ids=pb.TokenIds()), "token_ids"),
    (_asked(token_ids=pb.TokenIds(token_ids=[16])), "token_ids"),
    (_asked(token_ids=pb.TokenIds(token_ids=[2**32 - 1])), "token_ids"),
    (_asked(token_ids=pb.TokenIds(token_ids=[1] * MAX_LEN)), "prompt"),
    (pb.GenerateRequest(text="hi"), "text"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])), "chat"),
    (_with(temperature=math.nan), "temperature"),
    (_with(temperature=-1), "temperature"),
    (_with(temperature=math.inf), "temperature"),
    (_with(top_p=0), "top_p"),
    (_with(top_p=1.5), "top_p"),
    (_with(min_p=-0.1), "min_p"),
    (_with(repetition_penalty=0), "repetition_penalty"),
    (_with(presence_penalty=3), "presence_penalty"),
    (_with(frequency_penalty=math.nan), "frequency_penalty"),
    (_with(logit_bias={1: 200.0}), "logit_bias"),
    (_with(logit_bias={16: 1.0}), "logit_bias"),
    (_with(stop_token_ids=[16]), "stop_token_ids"),
    (_with(stop_token_ids=[1] * 65), "stop_token_ids"),
    (_with(stop=["x"]), "stop"),
    (_with(stop=[""]), "stop"),
    (_with(max_tokens=10**8), "max_tokens"),
    (_with(min_tokens=9, max_tokens=3), "min_tokens"),
    (_with(logprobs=21), "logprobs"),
    (_asked(request_id="a b"), "request_id"),
    (_asked(request_id="x" * 129), "request_id"),
    (_asked(resume_offset=0), "request_id"),
    (_asked(session_id="a\nb"), "session_id"),
    (_asked(session_id="{tag}:session"), "session_id"),
    (_asked(speculation=pb.SpeculationParameters(num_speculative_tokens=65)), "num_speculative_tokens"),
    (_asked(speculation=pb.SpeculationParameters(drafter="oracle")), "drafter"),
    (_asked(speculation=pb.SpeculationParameters(acceptance_rule=9)), "acceptance_rule"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f"{index}-{field}" for index, (_, field) in enumerate(BAD)])
async def test_wrong_fields_are_named(stub: GenerationServiceStub, request_: pb.GenerateRequest, field: str) -> None:
    error = await _error(stub, request_)
    assert isinstance(error, InvalidArgument), error
    assert error.field == field
    assert field in error.message or field == "prompt"


async def test_unknown_sessions(stub: GenerationServiceStub) -> None:
    resumed = _asked(request_id="r", session_id="nobody", resume_offset=0)
    assert isinstance(await _error(stub, resumed), SessionNotFound)
    calls = (
        stub.GetSession(pb.GetSessionRequest(session_id="nobody")),
        stub.CancelGeneration(pb.CancelGenerationRequest(session_id="nobody")),
        stub.DeleteSession(pb.DeleteSessionRequest(session_id="nobody")),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert isinstance(error_from_rpc(caught.value), SessionNotFound)


async def test_an_unknown_request_of_a_known_session(shared_stack: LocalStack, stub: GenerationServiceStub) -> None:
    async with shared_stack.client() as client:
        done = await client.complete(GenerationRequest(token_ids=(1,), parameters=SamplingParameters(max_tokens=2)))
    assert isinstance(
        await _error(stub, _asked(request_id="other", session_id=done.session_id, resume_offset=0)), RequestNotFound
    )


async def test_messages_that_are_too_large_or_malformed(shared_stack: LocalStack, stub: GenerationServiceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(pb.GenerateRequest(text="x" * (5 << 20)), timeout=30):
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with grpc.aio.insecure_channel(shared_stack.addresses[0]) as channel:
        garbage = channel.unary_stream("/outrider.v1.GenerationService/Generate")
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in garbage(b"\xff\xff\xff\xff", timeout=30):
                pass


async def test_a_draft_with_another_tokenizer_is_kept_out_and_named(shared_stack: LocalStack) -> None:
    async with shared_stack.client() as client:
        workers = (await client.list_models()).workers
        target = next(worker.info for worker in workers if worker.info.role == worker_pb2.WORKER_ROLE_TARGET)
        (other,) = [worker for worker in workers if worker.info.model == OTHER_TOKENIZER]
        assert not other.in_rotation
        assert "FAILED_PRECONDITION" in other.reason
        assert other.info.tokenizer_fingerprint in other.reason
        assert target.tokenizer_fingerprint in other.reason
        request = GenerationRequest(
            token_ids=(1, 2), parameters=SamplingParameters(max_tokens=60, seed=1, ignore_eos=True)
        )
        assert len((await client.complete(request, timeout_s=30)).token_ids) == 60


async def test_a_draft_refuses_another_tokenizer_at_the_handshake(shared_stack: LocalStack) -> None:
    async with grpc.aio.insecure_channel(shared_stack.drafts[0].address) as channel:
        info = await WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
        opening = draft_pb2.DraftOpen(
            session_id="s",
            fencing_token=1,
            parameters=wire.parameters_to_message(SamplingParameters(seed=1)),
            acceptance_rule=tokens_pb2.ACCEPTANCE_RULE_COUPLED,
            prompt_len=1,
            tokenizer_fingerprint="another",
        )
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        await call.write(draft_pb2.DraftRequest(frames=[draft_pb2.DraftRequestFrame(handle=1, open=opening)]))
        refusal = (await call.read()).frames[0].refusal
        await call.done_writing()
        assert refusal.reason == "TOKENIZER_MISMATCH"
        assert {"another", info.tokenizer_fingerprint} <= set(refusal.metadata.values())


async def test_after_all_that_requests_are_served(shared_stack: LocalStack) -> None:
    async with shared_stack.client() as client:
        parameters = SamplingParameters(max_tokens=20, seed=3, ignore_eos=True)
        drafted, plain = [
            await client.complete(
                GenerationRequest(token_ids=(1, 2), parameters=parameters, speculation=Speculation(disabled=disabled)),
                timeout_s=30,
            )
            for disabled in (False, True)
        ]
        assert drafted.token_ids == plain.token_ids
