"""All named errors of Outrider.

    OutriderError
    ├── InvalidArgument      a field of the request is wrong; names the field
    ├── Unauthenticated      the request has no token, or an invalid one
    ├── SessionNotFound      no such session, or another tenant's
    ├── RequestNotFound      the session has no such request
    ├── Fenced               a newer lease exists; the holder of this one must stop
    ├── KVCacheMiss          the worker has fewer tokens cached than the span assumes; send an earlier span
    ├── SessionBusy          another request is running on the session
    ├── SessionConflict      the messages contradict what the session holds
    ├── DuplicateRequest     the request id was used for a different request
    ├── Overloaded           a limit is reached; retry after `retry_after_s`
    ├── Draining             the process is shutting down; go elsewhere
    ├── DataLoss             the session's log no longer has all acknowledged tokens
    ├── TokenizerMismatch    draft and target (or session and target) do not share a tokenizer
    ├── ModelMismatch        the session was made with another model
    ├── ModelUnsupported     the model's cache cannot roll back, or its attention cannot be replaced
    ├── RuleUnsupported      the targets do not serve the acceptance rule that the request names
    ├── ConstraintFailed     no token goes on with the output, or the constraint exceeds a bound at this point
    ├── RequestFailed        the request itself makes a healthy worker fail; a retry may not help
    ├── Unavailable          a required process cannot be reached within its timeout
    └── DeadlineExceeded     the client's deadline passed

One table, in `serving.status`, maps reasons to gRPC codes, for servers and clients alike.
"""

from collections.abc import Mapping
from typing import ClassVar

_MAX_MESSAGE_LEN = 1000
"""Maximum characters of a message: it may quote the request, and it is sent in gRPC metadata, whose size is limited."""


class OutriderError(Exception):
    """The base of all errors: a `reason` that is sent over gRPC, a one-line message, and typed fields as `metadata`."""

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        self.message = message if len(message) <= _MAX_MESSAGE_LEN else f"{message[:_MAX_MESSAGE_LEN]} ..."
        super().__init__(self.message)

    @property
    def metadata(self) -> dict[str, str]:
        """The error's typed fields as strings; `from_metadata` is its inverse."""
        return {}

    @classmethod
    def from_metadata(cls, message: str, metadata: Mapping[str, str]) -> "OutriderError":
        """Return the error that a peer raised, from its message and its `metadata`."""
        return cls(message)


class InvalidArgument(OutriderError):
    """A field of the request is out of range, malformed or missing."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message if message.startswith(field) else f"{field}: {message}")
        self.field = field

    @property
    def metadata(self) -> dict[str, str]:
        return {"field": self.field}

    @classmethod
    def from_metadata(cls, message: str, metadata: Mapping[str, str]) -> "InvalidArgument":
        return cls(message, metadata.get("field", "request"))


class Unauthenticated(OutriderError):
    """The request has no token, or an invalid one."""

    reason = "UNAUTHENTICATED"


class SessionNotFound(OutriderError):
    """There is no such session, or it belongs to another tenant; the error is the same for both."""

    reason = "SESSION_NOT_FOUND"


class RequestNotFound(OutriderError):
    """The session has no such request to resume or cancel."""

    reason = "REQUEST_NOT_FOUND"


class Fenced(OutriderError):
    """A lease with a higher fencing token exists."""

    reason = "FENCED"


class KVCacheMiss(OutriderError):
    """The span starts beyond the worker's KV cache, which has `cached_len` tokens."""

    reason = "KV_CACHE_MISS"

    def __init__(self, message: str, cached_len: int) -> None:
        super().__init__(message)
        self.cached_len = cached_len

    @property
    def metadata(self) -> dict[str, str]:
        return {"cached_len": str(self.cached_len)}

    @classmethod
    def from_metadata(cls, message: str, metadata: Mapping[str, str]) -> "KVCacheMiss":
        return cls(message, int(metadata.get("cached_len", "0")))


class SessionBusy(OutriderError):
    """Another request is running on the session."""

    reason = "SESSION_BUSY"


class SessionConflict(OutriderError):
    """The messages of a request contradict what its session holds."""

    reason = "SESSION_CONFLICT"


class DuplicateRequest(OutriderError):
    """The request id was used before, with other content."""

    reason = "DUPLICATE_REQUEST"


class Overloaded(OutriderError):
    """A limit is reached; a retry after `retry_after_s` seconds may succeed."""

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def metadata(self) -> dict[str, str]:
        return {"retry_after_s": str(self.retry_after_s)}

    @classmethod
    def from_metadata(cls, message: str, metadata: Mapping[str, str]) -> "Overloaded":
        return cls(message, float(metadata.get("retry_after_s", "1.0")))


class Draining(OutriderError):
    """The process is shutting down: it finishes running requests and accepts no new ones."""

    reason = "DRAINING"


class DataLoss(OutriderError):
    """The session's log no longer has all tokens that were acknowledged."""

    reason = "DATA_LOSS"


class TokenizerMismatch(OutriderError):
    """The tokenizers of draft and target differ; both fingerprints are in the metadata."""

    reason = "TOKENIZER_MISMATCH"

    def __init__(self, message: str, draft: str, target: str) -> None:
        super().__init__(message)
        self.draft = draft
        self.target = target

    @property
    def metadata(self) -> dict[str, str]:
        return {"draft_tokenizer_fingerprint": self.draft, "target_tokenizer_fingerprint": self.target}

    @classmethod
    def from_metadata(cls, message: str, metadata: Mapping[str, str]) -> "TokenizerMismatch":
        return cls(
            message,
            metadata.get("draft_tokenizer_fingerprint", ""),
            metadata.get("target_tokenizer_fingerprint", ""),
        )


class ModelMismatch(OutriderError):
    """The session was created with another model."""

    reason = "MODEL_MISMATCH"


class ModelUnsupported(OutriderError):
    """The model cannot be served exactly, for the reason in the message."""

    reason = "MODEL_UNSUPPORTED"


class RuleUnsupported(OutriderError):
    """The targets do not serve the acceptance rule that the request names."""

    reason = "RULE_UNSUPPORTED"


class ConstraintFailed(OutriderError):
    """No token that the constraint allows can follow the output, or finding them exceeds the bounds of the matcher."""

    reason = "CONSTRAINT_FAILED"


class RequestFailed(OutriderError):
    """The request itself makes a healthy worker fail; a retry is likely to fail again."""

    reason = "REQUEST_FAILED"


class Unavailable(OutriderError):
    """A required process cannot be reached within its timeout."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(OutriderError):
    """The client's deadline passed."""

    reason = "DEADLINE_EXCEEDED"


_KINDS: tuple[type[OutriderError], ...] = (
    InvalidArgument,
    Unauthenticated,
    SessionNotFound,
    RequestNotFound,
    Fenced,
    KVCacheMiss,
    SessionBusy,
    SessionConflict,
    DuplicateRequest,
    Overloaded,
    Draining,
    DataLoss,
    TokenizerMismatch,
    ModelMismatch,
    ModelUnsupported,
    RuleUnsupported,
    ConstraintFailed,
    RequestFailed,
    Unavailable,
    DeadlineExceeded,
)

ERRORS: Mapping[str, type[OutriderError]] = {kind.reason: kind for kind in _KINDS}
"""All exception classes by reason."""


def from_reason(reason: str, message: str, metadata: Mapping[str, str]) -> OutriderError:
    """Return the exception of a reason; an `OutriderError` for a reason that this version does not have."""
    return ERRORS.get(reason, OutriderError).from_metadata(message, metadata)
