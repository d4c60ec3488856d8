"""Errors to gRPC statuses and back: the one table, so that `except KVCacheMiss` works across the wire."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple, cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from outrider import errors
from outrider.errors import Draining, InvalidArgument, OutriderError, Overloaded

DOMAIN: Final = "outrider"
"""The `domain` of every ErrorInfo; reasons of other domains are not ours to interpret."""

CODES: Final[Mapping[str, grpc.StatusCode]] = {
    errors.InvalidArgument.reason: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated.reason: grpc.StatusCode.UNAUTHENTICATED,
    errors.SessionNotFound.reason: grpc.StatusCode.NOT_FOUND,
    errors.RequestNotFound.reason: grpc.StatusCode.NOT_FOUND,
    errors.Fenced.reason: grpc.StatusCode.ABORTED,
    errors.KVCacheMiss.reason: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SessionBusy.reason: grpc.StatusCode.ABORTED,
    errors.SessionConflict.reason: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DuplicateRequest.reason: grpc.StatusCode.ALREADY_EXISTS,
    errors.Overloaded.reason: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Draining.reason: grpc.StatusCode.UNAVAILABLE,
    errors.DataLoss.reason: grpc.StatusCode.DATA_LOSS,
    errors.TokenizerMismatch.reason: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelMismatch.reason: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelUnsupported.reason: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RuleUnsupported.reason: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConstraintFailed.reason: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RequestFailed.reason: grpc.StatusCode.INTERNAL,
    errors.Unavailable.reason: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded.reason: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Reason -> gRPC code. A reason that is not here is INTERNAL, without its text."""

_DRAINING_RETRY_S: Final = 1.0
_DETAILS_KEY: Final = "grpc-status-details-bin"
_CODES_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}
# Statuses of gRPC itself or of a proxy, without our details. CANCELLED comes from a peer that stopped under the call.
_REASONS: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated.reason,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable.reason,
    grpc.StatusCode.CANCELLED: errors.Unavailable.reason,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded.reason,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded.reason,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument.reason,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss.reason,
}


def status_from_error(error: Exception) -> Status:
    """Return the google.rpc.Status of an error: INTERNAL, and not a word more, for what the table does not hold."""
    if not isinstance(error, OutriderError) or error.reason not in CODES:
        return Status(code=grpc.StatusCode.INTERNAL.value[0], message="internal error")
    return Status(code=CODES[error.reason].value[0], message=error.message, details=_details(error))


class _Status(NamedTuple):
    """What `context.abort_with_status` reads.

    The package grpcio-status makes the same of a google.rpc.Status; it requires the protobuf of its own release, and
    vLLM's environment may have an older one.
    """

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def grpc_status_from_error(error: Exception) -> grpc.Status:
    """Return what `context.abort_with_status` takes."""
    status = status_from_error(error)
    metadata = ((_DETAILS_KEY, status.SerializeToString()),)
    return cast(grpc.Status, _Status(_CODES_BY_NUMBER[status.code], status.message, metadata))


def error_from_rpc(error: grpc.aio.AioRpcError) -> OutriderError:
    """Return the error that the peer raised; for a status without our details, the nearest error of its code."""
    message = error.details() or error.code().name
    info = _error_info(error)
    reason, metadata = (info.reason, dict(info.metadata)) if info else (_REASONS.get(error.code(), ""), {})
    try:
        return errors.from_reason(reason, message, metadata)
    except ValueError:  # the metadata of a newer or broken peer
        return OutriderError(message)


@contextmanager
def peer_errors() -> Iterator[None]:
    """Raise, for an `AioRpcError` within the block, the `OutriderError` it stands for."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


def _details(error: OutriderError) -> list[Any]:
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)]
    if isinstance(error, InvalidArgument):
        violation = BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded | Draining):
        delay = Duration()
        delay.FromNanoseconds(int(1e9 * getattr(error, "retry_after_s", _DRAINING_RETRY_S)))
        details.append(RetryInfo(retry_delay=delay))
    return [_packed(detail) for detail in details]


def _packed(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _error_info(error: grpc.aio.AioRpcError) -> ErrorInfo | None:
    """Return our ErrorInfo, None where the status carries none that can be read."""
    info = ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                details = Status.FromString(value).details
                if any(detail.Unpack(info) and info.domain == DOMAIN for detail in details):
                    return info
            except DecodeError:
                return None
    return None
