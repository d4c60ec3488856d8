"""Frames of a Verify stream to commands of the engine, checked."""

import functools
import time
from collections.abc import Callable
from typing import Final

from outrider import wire
from outrider.errors import InvalidArgument
from outrider.parameters import MAX_SPECULATIVE_TOKENS, AcceptanceRule
from outrider.tokens import ProposalPart, TokenSpan
from outrider.v1 import target_pb2, tokens_pb2
from target_service.engine.requests import Requests
from target_service.engine.speculation import SpeculationTerms
from target_service.engine.stream import OpenCommand, Stream

_MAX_WAIT_S: Final = 60.0
_MAX_STOP_TOKEN_IDS: Final = 1024
"""A request's own are 64 at most; the model's end-of-text tokens come with them."""
_MAX_FEATURE_LAYERS: Final = 1024
_MAX_NODES: Final = 4096
"""Of a part of a proposal; how many of them may live is a setting, which this bounds too."""

GENTLE: Final = frozenset({"proposal", "window"})
"""Frames that end no request and change no tokens."""
OPTIONAL: Final = frozenset({"proposal", "features"})
"""Frames without which a session goes on: a wrong one is refused, and ends nothing."""


def kind_of(frame: target_pb2.VerifyRequestFrame) -> str:
    """Returns what a frame holds; empty where it holds nothing that is known here."""
    return frame.WhichOneof("frame") or ""


def command_from_frame(requests: Requests, stream: Stream, frame: target_pb2.VerifyRequestFrame) -> Callable[[], None]:
    """Returns what a frame asks for, to be called in the engine's thread.

    Raises:
        InvalidArgument: a field is wrong; the error names it.
    """
    handle = frame.handle
    match kind_of(frame):
        case "open":
            return functools.partial(requests.open, stream, handle, _open(frame.open))
        case "span":
            return functools.partial(requests.span, stream, handle, _span(frame.span, requests.max_len))
        case "proposal":
            # When it came counts, not when the pass that runs now is over.
            part, arrived = _proposal(frame.proposal), time.monotonic()
            return functools.partial(requests.propose, stream, handle, part, arrived)
        case "window":
            window = frame.window
            return functools.partial(requests.window, stream, handle, window.committed_len, window.window_end)
        case "speculation":
            return functools.partial(requests.speculate, stream, handle, _terms(frame.speculation))
        case "features":
            wanted = frame.features
            _check_num("layers", len(wanted.layers), _MAX_FEATURE_LAYERS)
            return functools.partial(requests.give_features, stream, handle, tuple(wanted.layers), wanted.start)
        case "close":
            return functools.partial(requests.close, stream, handle, frame.close.committed_len)
        case "forget":
            wire.check_name(frame.forget.session_id, "session_id", least=1)
            return functools.partial(requests.forget, frame.forget.session_id)
        case _:
            raise InvalidArgument("frame has no content", "frame")


def _open(message: target_pb2.VerifyOpen) -> OpenCommand:
    wire.check_name(message.session_id, "session_id", least=1)
    for field in ("request_id", "traceparent", "cache_salt"):
        wire.check_name(getattr(message, field), field)
    _check_num("stop_token_ids", len(message.stop_token_ids), _MAX_STOP_TOKEN_IDS)
    _check_num("feature_layers", len(message.feature_layers), _MAX_FEATURE_LAYERS)
    return OpenCommand(
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
    )


def _span(message: tokens_pb2.TokenSpan, max_len: int) -> TokenSpan:
    # Before it is made: a message holds a million tokens.
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
    return SpeculationTerms(
        num,
        settings.max_wait_s,
        settings.lookahead,
        settings.draft_min,
        settings.own_draft,
    )


def _check_num(field: str, num: int, most: int) -> None:
    if num > most:
        raise InvalidArgument(f"{field} has {num} entries, may have at most {most}", field)
