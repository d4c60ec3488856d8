"""Conversion of frames to checked commands of the engine, and of its replies to frames."""

from array import array
from collections.abc import Sequence
from typing import Final

from draft_service.engine.commands import (
    AdvanceSession,
    CloseSession,
    FeaturesMissing,
    ForgetSession,
    GiveFeatures,
    Handle,
    Opened,
    OpenSession,
    Proposed,
    Refused,
    Reply,
    SessionCommand,
)
from outrider.drafters.drafter import DrafterInfo, DraftTerms
from outrider.errors import InvalidArgument, ModelMismatch, TokenizerMismatch
from outrider.parameters import AcceptanceRule
from outrider.tokens import FeatureSpan
from outrider.v1 import draft_pb2
from outrider.wire import (
    base_from_message,
    check_name,
    parameters_from_message,
    proposal_to_message,
    refusal_to_message,
    rule_from_number,
    span_from_message,
)

_MAX_STOP_TOKEN_IDS: Final = 1024
"""A request has 64 at most; the model's end-of-text tokens are added to them."""


def command_from_frame(frame: draft_pb2.DraftRequestFrame, handle: Handle, info: DrafterInfo) -> SessionCommand:
    """Return the command of a frame.

    Args:
        frame: the frame; nothing about it has been checked.
        handle: the frame's handle on its stream.
        info: of the drafter.

    Raises:
        InvalidArgument: a field is wrong; the error names it.
        TokenizerMismatch: the session's tokenizer is not the drafter's.
    """
    match frame.WhichOneof("frame"):
        case "open":
            return _open(frame.open, handle, info)
        case "advance":
            return _advance(frame.advance, handle, info)
        case "features":
            return GiveFeatures(handle, FeatureSpan(frame.features.start, frame.features.data))
        case "close":
            return CloseSession(handle)
        case "forget":
            check_name(frame.forget.session_id, "session_id", least=1)
            return ForgetSession(handle, frame.forget.session_id)
        case _:
            raise InvalidArgument("the frame has no content that this version supports", "frame")


def frame_from_reply(reply: Reply) -> draft_pb2.DraftResponseFrame:
    """Return the frame of a reply."""
    match reply:
        case Opened(handle, known_len, features_len):
            opened = draft_pb2.DraftOpened(cached_len=known_len, features_len=features_len)
            return draft_pb2.DraftResponseFrame(handle=handle, opened=opened)
        case FeaturesMissing(handle, start, num_frames):
            missing = draft_pb2.FeaturesMissing(start=start, num_frames=num_frames)
            return draft_pb2.DraftResponseFrame(handle=handle, features_missing=missing)
        case Proposed(handle, part):
            return draft_pb2.DraftResponseFrame(handle=handle, proposal=proposal_to_message(part))
        case Refused(handle, error):
            return draft_pb2.DraftResponseFrame(handle=handle, refusal=refusal_to_message(error))


def _open(message: draft_pb2.DraftOpen, handle: Handle, info: DrafterInfo) -> OpenSession:
    check_name(message.session_id, "session_id", least=1)
    for field in ("request_id", "traceparent", "cache_salt", "tokenizer_fingerprint", "target_fingerprint"):
        check_name(getattr(message, field), field)
    _check_tokenizer(message.tokenizer_fingerprint, info.tokenizer_fingerprint)
    _check_target(message.target_fingerprint, info)
    parameters = parameters_from_message(message.parameters)
    parameters.check_vocabulary(info.vocabulary_size)
    if parameters.seed is None and not parameters.is_greedy:
        raise InvalidArgument("must be set", "seed")
    if (num := len(message.stop_token_ids)) > _MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(f"has {num} entries, may have at most {_MAX_STOP_TOKEN_IDS}", "stop_token_ids")
    stop_token_ids = tuple(message.stop_token_ids)
    _check_token_ids(stop_token_ids, info.vocabulary_size, "stop_token_ids")
    terms = DraftTerms(
        parameters=parameters,
        acceptance_rule=(rule_from_number(message.acceptance_rule) or AcceptanceRule.COUPLED).for_drafts,
        prompt_len=message.prompt_len,
        stop_token_ids=frozenset(stop_token_ids),
        cache_salt=message.cache_salt,
        prediction=_prediction(message.prediction, info),
        p_min=message.draft_p_min if message.HasField("draft_p_min") else None,
    )
    if not 0 <= message.draft_p_min <= 1:
        raise InvalidArgument("must be in [0, 1]", "draft_p_min")
    ids = message.request_id, message.traceparent
    return OpenSession(handle, message.session_id, message.fencing_token, terms, *ids)


def _prediction(token_ids: Sequence[int], info: DrafterInfo) -> "array[int]":
    if len(token_ids) > info.max_session_len:
        raise InvalidArgument(f"has {len(token_ids)} tokens, may have {info.max_session_len}", "prediction")
    _check_token_ids(token_ids, info.vocabulary_size, "prediction")
    return array("I", token_ids)


def _advance(message: draft_pb2.DraftAdvance, handle: Handle, info: DrafterInfo) -> AdvanceSession:
    base = base_from_message(message.base)
    # Before the span is read: a message holds a million tokens.
    end = message.span.start + len(message.span.token_ids)
    if base.len != end:
        raise InvalidArgument(f"is {base.len}, the span ends at {end}", "base.len")
    if not 1 <= base.len <= info.max_session_len:
        raise InvalidArgument(f"is {base.len}, must be in [1, {info.max_session_len}]", "base.len")
    span = span_from_message(message.span)
    _check_token_ids(span.token_ids, info.vocabulary_size, "span.token_ids")
    return AdvanceSession(handle, base, span, message.num_speculative_tokens, message.max_nodes, message.lookahead)


def _check_tokenizer(target: str, draft: str) -> None:
    if target and draft and target != draft:
        raise TokenizerMismatch("draft and target do not share a tokenizer", draft=draft, target=target)


def _check_target(target: str, info: DrafterInfo) -> None:
    if target and info.target_fingerprint and target != info.target_fingerprint:
        raise ModelMismatch(f"the draft {info.model} was made for target {info.target_fingerprint}, this is {target}")


def _check_token_ids(token_ids: Sequence[int], vocabulary_size: int, field: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocabulary_size:
        raise InvalidArgument(f"has token id {largest}, the vocabulary has {vocabulary_size}", field)
