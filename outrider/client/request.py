"""A generation request: a prompt in one of three forms, sampling parameters, limits, and how to speculate."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider import wire
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.v1 import generation_pb2

MAX_UINT32 = 2**32 - 1


class Message(NamedTuple):
    """One message of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request speculates; under `coupled` and greedy decoding this never changes its text.

    Attributes:
        disabled: decodes without a draft.
        num_speculative_tokens: tokens drafted per round, at most; 0 takes the service's default.
        acceptance_rule: the rule that verifies proposals; None takes the service's default.
        drafter: model, ngram, layers, eagle3 or medusa, where several are deployed; empty takes any.
        max_nodes: nodes of a proposal, all its branches together, at most; 0 leaves it to the draft.
        lookahead: nodes that the draft may propose ahead of the target's verdicts, at most; 0 has it wait for
            each verdict, None takes the service's default.
        draft_min: shortest main line that is verified, in tokens.
        draft_p_min: probability below which the draft ends a branch, in [0, 1]; None leaves it to the draft.
    """

    disabled: bool = False
    num_speculative_tokens: int = 0
    acceptance_rule: AcceptanceRule | None = None
    drafter: str = ""
    max_nodes: int = 0
    lookahead: int | None = None
    draft_min: int = 0
    draft_p_min: float | None = None

    def to_message(self) -> generation_pb2.SpeculationParameters:
        """Return the message."""
        message = generation_pb2.SpeculationParameters(
            disabled=self.disabled,
            num_speculative_tokens=_uint32("num_speculative_tokens", self.num_speculative_tokens),
            drafter=self.drafter,
            max_nodes=_uint32("max_nodes", self.max_nodes),
            lookahead=(None if self.lookahead is None else _uint32("lookahead", self.lookahead)),
            draft_min=_uint32("draft_min", self.draft_min),
            draft_p_min=self.draft_p_min,
        )
        if self.acceptance_rule is not None:
            message.acceptance_rule = wire.rule_to_number(self.acceptance_rule)
        return message


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request; exactly one of `text`, `token_ids` and `messages` is given.

    Attributes:
        text: plain text to continue.
        token_ids: token ids to continue, as they are.
        messages: a conversation's new messages, rendered with the model's chat template.
        parameters: sampling parameters and limits of the output.
        speculation: how to speculate.
        session_id: session to continue or to create; empty lets the service derive one.
        request_id: makes the request idempotent; random where not given, so that every request can be resumed.
        resume_offset: output tokens already received of a request begun earlier; None for a new request.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    speculation: Speculation = field(default_factory=Speculation)
    session_id: str = ""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    resume_offset: int | None = None

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.text, self.token_ids, self.messages)) != 1:
            raise InvalidArgument("give exactly one of text, token_ids and messages", "prompt")

    def to_message(self) -> generation_pb2.GenerateRequest:
        """Return the message of the first attempt; raise `InvalidArgument` for what no message can carry."""
        self.parameters.check_vocabulary(MAX_UINT32 + 1)
        message = generation_pb2.GenerateRequest(
            request_id=self.request_id,
            session_id=self.session_id,
            parameters=wire.parameters_to_message(self.parameters),
            speculation=self.speculation.to_message(),
        )
        if self.resume_offset is not None:
            message.resume_offset = _uint32("resume_offset", self.resume_offset)
        if self.text is not None:
            message.text = _unicode("text", self.text)
        elif self.token_ids is not None:
            token_ids = [_uint32("token_ids", token_id) for token_id in self.token_ids]
            message.token_ids.CopyFrom(generation_pb2.TokenIds(token_ids=token_ids))
        elif self.messages is not None:
            messages = [
                generation_pb2.ChatMessage(role=_unicode("role", role), content=_unicode("content", content))
                for role, content in self.messages
            ]
            message.chat.CopyFrom(generation_pb2.Chat(messages=messages))
        return message


def _uint32(field_name: str, value: int) -> int:
    if not 0 <= value <= MAX_UINT32:
        raise InvalidArgument(f"{field_name} has {value}, must be in [0, {MAX_UINT32}]", field_name)
    return value


def _unicode(field_name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field_name} is not valid Unicode at character {error.start}", field_name) from error
    return text
