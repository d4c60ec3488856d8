"""Faults 39 to 42, 44 and 46: what callers may send is bounded, and what they send reaches neither keys nor logs.

43 and 45, whose session it is and who may call, are in tests/orchestrator/api/test_authentication.py and
tests/served/test_secured.py.
"""

import math

import grpc
import pytest
import redis.asyncio

from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.status import error_from_rpc
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import tokens_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.scene import Scene, asking
from tests.faults.stack import FaultStack

VOCABULARY_SIZE = 16


async def told(stack: FaultStack, request: pb.GenerateRequest) -> OutriderError:
    """Returns the error that a request gets."""
    async with grpc.aio.insecure_channel(stack.orchestrators[0].address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in GenerationServiceStub(channel).Generate(request, timeout=10):
                pass
    return error_from_rpc(caught.value)


def request(**changes: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"token_ids": pb.TokenIds(token_ids=[1, 2]), **changes})  # type: ignore[arg-type]


def with_parameters(**parameters: object) -> pb.GenerateRequest:
    return request(parameters=tokens_pb2.SamplingParameters(**parameters))  # type: ignore[arg-type]


async def named(scene: Scene, asked: pb.GenerateRequest, field: str) -> None:
    error = await told(scene.stack, asked)
    assert isinstance(error, InvalidArgument), error
    assert error.field == field


async def test_fault_39_prompt_over_the_limit(scene: Scene) -> None:
    await named(scene, request(token_ids=pb.TokenIds(token_ids=[1] * 70_000)), "prompt")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request(token_ids=pb.TokenIds(token_ids=[VOCABULARY_SIZE])), "token_ids"),
        (request(token_ids=pb.TokenIds(token_ids=[2**32 - 1])), "token_ids"),
        (with_parameters(stop_token_ids=[VOCABULARY_SIZE]), "stop_token_ids"),
        (with_parameters(logit_bias={VOCABULARY_SIZE: 1.0}), "logit_bias"),
    ],
)
async def test_fault_40_token_ids_outside_the_vocabulary(scene: Scene, asked: pb.GenerateRequest, field: str) -> None:
    await named(scene, asked, field)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0])
async def test_fault_41_nan_inf_negative_sampling_parameters(scene: Scene, field: str, value: float) -> None:
    await named(scene, with_parameters(**{field: value}), field)


async def test_fault_42_oversized_and_malformed_messages(scene: Scene) -> None:
    async with grpc.aio.insecure_channel(scene.stack.orchestrators[0].address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="x" * (5 << 20))):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        raw = channel.unary_stream("/outrider.v1.GenerationService/Generate")
        for garbage in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", bytes(1000)):
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in raw(garbage, timeout=10):
                    pass
    # Workers are called by what speaks the protocol, or by nobody.
    for process, method in (
        (scene.stack.targets[0], "/outrider.v1.TargetService/Verify"),
        (scene.stack.drafts[0], "/outrider.v1.DraftService/Draft"),
    ):
        async with grpc.aio.insecure_channel(process.address) as channel:
            call = channel.stream_stream(method)(iter([b"\xff" * 40]), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
    await scene.survive_beside(asking())


@pytest.mark.parametrize("name", ["session_id", "request_id"])
@pytest.mark.parametrize("value", ["a b", "a\nb", "{tag}:session", "*", "a" * 129, "ü", "\x00"])
async def test_fault_44_key_injection_through_ids(scene: Scene, name: str, value: str) -> None:
    async with redis.asyncio.Redis.from_url(scene.stack.redis.url) as raw:
        before = set(await raw.keys("*"))
        await named(scene, request(**{name: value}), name)
        assert set(await raw.keys("*")) == before


async def test_fault_46_log_injection(scene: Scene) -> None:
    forged = '"}\n{"level": "error", "message": "forged by a caller"}\r\x1b[2K'
    await told(scene.stack, request(session_id=forged))
    await told(scene.stack, request(speculation=pb.SpeculationParameters(drafter=forged)))
    async with grpc.aio.insecure_channel(scene.stack.orchestrators[0].address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/outrider.v1.GenerationService/Nothing")(forged.encode(), timeout=10)
    await scene.survive_beside(asking())
    for process in scene.stack.processes:
        lines = process.log.read_text().split("\n")
        assert all(line.isprintable() for line in lines)
        assert not any(line.lstrip().startswith('{"level": "error", "message": "forged') for line in lines)
