"""Conversion of the frames of a Verify stream to checked commands of the engine, and of its results to frames."""

import time
from array import array
from typing import Final

from outrider import wire
from outrider.errors import InvalidArgument
from outrider.parameters import MAX_SPECULATIVE_TOKENS, AcceptanceRule
from outrider.tokens import MAX_PROPOSAL_NODES, ProposalPart, TokenSpan
from outrider.v1 import target_pb2, tokens_pb2
from target_service.engine.commands import (
    Close,
    Forget,
    FrameCommand,
    Handle,
    Open,
    Propose,
    SendFeatures,
    Span,
    Speculate,
    SpeculationTerms,
    Window,
)
from target_service.engine.results import Features, Opened, Progress, Refused, Result, Verdict

_MAX_WAIT_S: Final = 60.0
_MAX_STOP_TOKEN_IDS: Final = 1024
"""A request has 64 at most; the model's end-of-text tokens are added to them."""
_MAX_FEATURE_LAYERS: Final = 1024
_MAX_NODES: Final = 4096
"""Nodes of a part of a proposal; this also bounds the setting for the nodes of a whole one."""


def kind_of(frame: target_pb2.VerifyRequestFrame) -> str:
    """Return the name of a frame's content; empty where this version supports none of it."""
    return frame.WhichOneof("frame") or ""


def command_from_frame(frame: target_pb2.VerifyRequestFrame, handle: Handle, max_len: int) -> FrameCommand:
    """Return the command of a frame.

    Args:
        frame: the frame; nothing about it has been checked.
        handle: the frame's handle on its stream.
        max_len: longest session, in tokens.

    Raises:
        InvalidArgument: a field is wrong; the error names it.
    """
    match kind_of(frame):
        case "open":
            return _open(frame.open, handle, max_len)
        case "span":
            return Span(handle, _span(frame.span, max_len))
        case "proposal":
            # The time of arrival counts, not the end of the pass that runs now.
            return Propose(handle, _proposal(frame.proposal), time.monotonic())
        case "window":
            return Window(handle, frame.window.committed_len, frame.window.window_end)
        case "speculation":
            return Speculate(handle, _terms(frame.speculation))
        case "features":
            wanted = frame.features
            _check_num("layers", len(wanted.layers), _MAX_FEATURE_LAYERS)
            return SendFeatures(handle, tuple(wanted.layers), wanted.start)
        case "close":
            return Close(handle, frame.close.committed_len)
        case "forget":
            wire.check_name(frame.forget.session_id, "session_id", least=1)
            return Forget(handle, frame.forget.session_id)
        case _:
            raise InvalidArgument("the frame has no content that this version supports", "frame")


def frame_from_result(result: Result) -> target_pb2.VerifyResponseFrame:
    """Return the frame of a result."""
    match result:
        case Verdict():
            return target_pb2.VerifyResponseFrame(handle=result.handle, verdict=_verdict(result))
        case Opened(handle, cached_len, is_plain):
            opened = target_pb2.VerifyOpened(cached_len=cached_len, is_plain=is_plain)
            return target_pb2.VerifyResponseFrame(handle=handle, opened=opened)
        case Progress(handle, cached_len):
            progress = target_pb2.VerifyProgress(cached_len=cached_len)
            return target_pb2.VerifyResponseFrame(handle=handle, progress=progress)
        case Features(handle, features):
            return target_pb2.VerifyResponseFrame(handle=handle, features=wire.features_to_message(features))
        case Refused(handle, error):
            return target_pb2.VerifyResponseFrame(handle=handle, refusal=wire.refusal_to_message(error))


def _verdict(verdict: Verdict) -> target_pb2.Verdict:
    result, metrics = verdict.result, verdict.metrics
    return target_pb2.Verdict(
        base=wire.base_to_message(verdict.base),
        token_ids=result.token_ids,
        origins=[wire.origin_to_number(origin) for origin in result.origins],
        logprobs=[wire.logprobs_to_message(logprobs) for logprobs in result.logprobs],
        num_draft_tokens=result.num_draft_tokens,
        num_accepted_tokens=result.num_accepted,
        num_nodes=result.num_nodes,
        finish_reason=wire.finish_to_number(result.finish_reason),
        model_time_s=metrics.model_time_s,
        wait_time_s=metrics.wait_time_s,
        queue_time_s=metrics.queue_time_s,
        expected_time_s=metrics.expected_time_s,
        num_speculative_tokens=metrics.num_wanted,
        num_recomputed_tokens=metrics.num_recomputed,
        hit=metrics.hit,
        num_proposed_nodes=metrics.num_proposed,
        lookahead=metrics.lookahead,
        drafters=result.drafters,
    )


def _open(message: target_pb2.VerifyOpen, handle: Handle, max_len: int) -> Open:
    wire.check_name(message.session_id, "session_id", least=1)
    for field in ("request_id", "traceparent", "cache_salt"):
        wire.check_name(getattr(message, field), field)
    _check_num("stop_token_ids", len(message.stop_token_ids), _MAX_STOP_TOKEN_IDS)
    _check_num("feature_layers", len(message.feature_layers), _MAX_FEATURE_LAYERS)
    _check_num("prediction", len(message.prediction), max_len)
    return Open(
        handle=handle,
        session_id=message.session_id,
        fencing_token=message.fencing_token,
        parameters=wire.parameters_from_message(message.parameters),
        rule=wire.rule_from_number(message.acceptance_rule) or AcceptanceRule.COUPLED,
        prompt_len=message.prompt_len,
        committed_len=max(message.committed_len, message.prompt_len),
        window_end=message.window_end,
        stop_token_ids=frozenset(message.stop_token_ids),
        speculation=_terms(message.speculation),
        cache_salt=message.cache_salt,
        feature_layers=tuple(message.feature_layers),
        request_id=message.request_id,
        traceparent=message.traceparent,
        prediction=array("I", message.prediction),
    )


def _span(message: tokens_pb2.TokenSpan, max_len: int) -> TokenSpan:
    # Before the span is read: a message holds a million tokens.
    if message.start + len(message.token_ids) > max_len:
        end = message.start + len(message.token_ids)
        raise InvalidArgument(f"span ends at {end}, the longest session has {max_len} tokens", "span")
    return wire.span_from_message(message)


def _proposal(message: tokens_pb2.Proposal) -> ProposalPart:
    _check_num("proposal", len(message.nodes), _MAX_NODES)
    return wire.proposal_from_message(message)


def _terms(settings: target_pb2.SpeculationSettings) -> SpeculationTerms:
    if not 0 <= settings.max_wait_s <= _MAX_WAIT_S:
        raise InvalidArgument(f"max_wait_s is {settings.max_wait_s}, must be in [0, {_MAX_WAIT_S}]", "max_wait_s")
    num, most = settings.num_speculative_tokens, MAX_SPECULATIVE_TOKENS
    if num > most:
        raise InvalidArgument(f"num_speculative_tokens is {num}, may be at most {most}", "num_speculative_tokens")
    if not 0 <= settings.draft_p_min <= 1:
        raise InvalidArgument("must be in [0, 1]", "draft_p_min")
    return SpeculationTerms(
        num,
        settings.max_wait_s,
        settings.lookahead,
        settings.draft_min,
        settings.own_draft,
        min(settings.max_nodes, MAX_PROPOSAL_NODES),
        settings.draft_p_min if settings.HasField("draft_p_min") else None,
        settings.forced_tokens,
    )


def _check_num(field: str, num: int, most: int) -> None:
    if num > most:
        raise InvalidArgument(f"{field} has {num} entries, may have at most {most}", field)
