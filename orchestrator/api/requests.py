"""Client requests: checked, and completed with defaults."""

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Final

from orchestrator.settings import OrchestratorSettings
from orchestrator.store.record import derived_session_id, is_derived
from outrider import wire
from outrider.drafter_names import DRAFTERS
from outrider.errors import InvalidArgument
from outrider.parameters import DRAFT_PLACES, MAX_SPECULATIVE_TOKENS, MAX_TOKENS, AcceptanceRule
from outrider.tokens import MAX_PROPOSAL_NODES
from outrider.v1 import generation_pb2, tokens_pb2
from outrider.workers.draft_session import SpeculationChoice

_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose fields are in range; the prompt is still text, messages or token ids.

    Attributes:
        request_id: the client's, else drawn.
        session_id: the client's, else derived from the request id.
        fingerprint: hash of all fields of the client's request.
        seed: the client's, else drawn.
        rule: acceptance rule that it names; None for none.
        speculation: how it speculates.
        reports: whether its stream has notices and statistics.
        resume_offset: output tokens that the client has; None for a new request or a repetition.
        counted_session: the session, where it counts against the tenant's limit; empty for one that no client named.
    """

    request_id: str
    session_id: str
    fingerprint: str
    seed: int
    rule: AcceptanceRule | None
    speculation: SpeculationChoice
    reports: bool
    resume_offset: int | None
    counted_session: str


def check_request(
    message: generation_pb2.GenerateRequest, tenant: str, settings: OrchestratorSettings
) -> CheckedRequest:
    """Return the checked request; raise `InvalidArgument` with the field's name."""
    if message.HasField("resume_offset") and not message.request_id:
        raise InvalidArgument("request_id is missing: a request is resumed by its id", "request_id")
    request_id = message.request_id or secrets.token_hex(16)
    check_id("request_id", request_id)
    session_id = message.session_id or derived_session_id(tenant, request_id)
    check_id("session_id", session_id)
    if message.WhichOneof("prompt") is None:
        raise InvalidArgument("prompt is missing: give text, token_ids or chat", "prompt")
    _check_parameters(message.parameters)
    return CheckedRequest(
        request_id=request_id,
        session_id=session_id,
        fingerprint=_fingerprint(message, request_id),
        seed=message.parameters.seed if message.parameters.HasField("seed") else secrets.randbits(64),
        rule=wire.rule_from_number(message.speculation.acceptance_rule),
        speculation=_speculation(message.speculation, settings),
        reports=message.speculation.report,
        resume_offset=message.resume_offset if message.HasField("resume_offset") else None,
        counted_session="" if is_derived(tenant, session_id, request_id) else session_id,
    )


def _check_parameters(given: tokens_pb2.SamplingParameters) -> None:
    """Raise `InvalidArgument` for a parameter out of range, before the model and its defaults are known."""
    known = tokens_pb2.SamplingParameters()
    known.CopyFrom(given)
    known.max_tokens = given.max_tokens or MAX_TOKENS
    wire.parameters_from_message(known)


def _speculation(
    speculation: generation_pb2.SpeculationParameters, settings: OrchestratorSettings
) -> SpeculationChoice:
    """Return how a request speculates; raise `InvalidArgument` with the field's name."""
    if speculation.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
        raise InvalidArgument(
            f"num_speculative_tokens is {speculation.num_speculative_tokens}, may be at most {MAX_SPECULATIVE_TOKENS}",
            "num_speculative_tokens",
        )
    if speculation.max_nodes > MAX_PROPOSAL_NODES:
        raise InvalidArgument(f"max_nodes is {speculation.max_nodes}, may be at most {MAX_PROPOSAL_NODES}", "max_nodes")
    if speculation.drafter not in ("", *DRAFTERS):
        raise InvalidArgument(f"drafter is {speculation.drafter!r}, must be one of {', '.join(DRAFTERS)}", "drafter")
    if speculation.draft_at not in ("", *DRAFT_PLACES):
        raise InvalidArgument(
            f"draft_at is {speculation.draft_at!r}, must be one of {', '.join(DRAFT_PLACES)}", "draft_at"
        )
    num = speculation.num_speculative_tokens or settings.num_speculative_tokens
    if speculation.draft_min > num:
        raise InvalidArgument(f"draft_min is {speculation.draft_min}, rounds verify at most {num}", "draft_min")
    if not 0 <= speculation.draft_p_min <= 1:
        raise InvalidArgument(f"draft_p_min is {speculation.draft_p_min}, must be in [0, 1]", "draft_p_min")
    lookahead = speculation.lookahead if speculation.HasField("lookahead") else settings.lookahead
    if lookahead > MAX_PROPOSAL_NODES:
        raise InvalidArgument(f"lookahead is {lookahead}, may be at most {MAX_PROPOSAL_NODES}", "lookahead")
    return SpeculationChoice(
        num_speculative_tokens=0 if speculation.disabled else num,
        drafter=speculation.drafter,
        draft_at=speculation.draft_at,
        max_nodes=speculation.max_nodes,
        lookahead=lookahead,
        draft_min=speculation.draft_min,
        draft_p_min=speculation.draft_p_min if speculation.HasField("draft_p_min") else None,
        max_wait_s=settings.draft_max_wait_s,
    )


def check_id(field: str, value: str) -> None:
    """Raise `InvalidArgument` unless the value is an id."""
    if not _ID.fullmatch(value):
        raise InvalidArgument(f"{field} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", field)


def _fingerprint(message: generation_pb2.GenerateRequest, request_id: str) -> str:
    content = generation_pb2.GenerateRequest()
    content.CopyFrom(message)
    # A client whose ids were drawn and derived may give them when it resumes.
    content.request_id = request_id
    content.ClearField("session_id")
    content.ClearField("resume_offset")
    return hashlib.sha256(content.SerializeToString(deterministic=True)).hexdigest()
