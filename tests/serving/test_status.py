"""Every error, over a real socket and back."""

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2, status_pb2

from outrider import errors
from outrider.serving.status import CODES, error_from_rpc, peer_errors, status_from_error
from outrider.v1 import worker_pb2, worker_pb2_grpc

EXAMPLES = {
    "INVALID_ARGUMENT": errors.InvalidArgument("is -1, must be 0 or more", "top_k"),
    "KV_CACHE_MISS": errors.KVCacheMiss("span starts at 9", 7),
    "OVERLOADED": errors.Overloaded("too many sessions", 2.5),
    "TOKENIZER_MISMATCH": errors.TokenizerMismatch("tokenizers differ", "aa", "bb"),
}
DETAILS_KEY = "grpc-status-details-bin"


def rpc_error(code: grpc.StatusCode, message: str = "said", details: bytes | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if details is None else grpc.aio.Metadata((DETAILS_KEY, details))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, message)


def example(reason: str) -> errors.OutriderError:
    return EXAMPLES.get(reason) or errors.ERRORS[reason](f"example of {reason}")


def test_the_table_holds_every_reason():
    assert set(CODES) == set(errors.ERRORS)


@pytest.mark.parametrize("reason", errors.ERRORS)
async def test_error_crosses_the_wire(reason, worker, channel):
    sent = example(reason)

    async def refuse():
        raise sent

    worker.behaviour = refuse
    with pytest.raises(errors.ERRORS[reason]) as caught, peer_errors():
        await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
    assert (caught.value.message, caught.value.metadata) == (sent.message, sent.metadata)
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    assert cause.code() is CODES[reason]


def unpacked(error: Exception, kind: type) -> list:
    found = []
    for detail in status_from_error(error).details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


def test_invalid_argument_names_the_field_as_other_languages_expect_it():
    (request,) = unpacked(EXAMPLES["INVALID_ARGUMENT"], error_details_pb2.BadRequest)
    assert [violation.field for violation in request.field_violations] == ["top_k"]


@pytest.mark.parametrize(("error", "delay_s"), [(EXAMPLES["OVERLOADED"], 2.5), (errors.Draining("bye"), 1.0)])
def test_retry_info_tells_when_to_come_back(error, delay_s):
    (retry,) = unpacked(error, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToNanoseconds() == delay_s * 1e9


@pytest.mark.parametrize("error", [ValueError("secret"), errors.OutriderError("secret"), KeyError("secret")])
def test_what_the_table_does_not_hold_is_internal_and_leaks_nothing(error):
    status = status_from_error(error)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert b"secret" not in status.SerializeToString()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
        (grpc.StatusCode.UNIMPLEMENTED, errors.OutriderError),
        (grpc.StatusCode.INTERNAL, errors.OutriderError),
    ],
)
def test_a_status_without_details_maps_by_its_code(code, kind):
    error = error_from_rpc(rpc_error(code))
    assert type(error) is kind
    assert "said" in error.message


def details_of(reason: str, domain: str, **metadata: str) -> bytes:
    packed = Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata))
    return status_pb2.Status(code=14, message="said", details=[packed]).SerializeToString()


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        (details_of("FENCED", "other.example"), errors.Unavailable),
        (details_of("A_REASON_OF_TOMORROW", "outrider"), errors.OutriderError),
        (details_of("KV_CACHE_MISS", "outrider", cached_len="many"), errors.OutriderError),
        (b"\xff\xff\xff", errors.Unavailable),
    ],
    ids=["another domain", "unknown reason", "broken metadata", "not a status"],
)
def test_details_of_other_and_broken_peers(details, kind):
    assert type(error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, details=details))) is kind
