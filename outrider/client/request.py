"""A generation request: a prompt in one of three forms, sampling parameters, limits, and how to speculate."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from outrider import wire
from outrider.client.messages import (
    Message,
    MessageLike,
    Tool,
    ToolCall,
    ToolLike,
    checked_messages,
    checked_text,
    checked_tools,
    message_of,
)
from outrider.client.prompt import MAX_UINT32, Prompt, checked_token_ids, checked_uint32, sorted_by_form
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.v1 import generation_pb2

__all__ = ["GenerationRequest", "Message", "Speculation", "Tool", "ToolCall"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request speculates; under `coupled` and greedy decoding this never changes its text.

    Attributes:
        disabled: decodes without a draft.
        num_speculative_tokens: tokens drafted per round, at most; 0 takes the service's default.
        acceptance_rule: the rule that verifies proposals; None takes the service's default.
        drafter: model, ngram, suffix, layers, eagle3, block or medusa, or a combination such as eagle3+suffix, where
            several are deployed; empty takes any.
        draft_at: where the draft runs: `service` or `target`, within the target's process; empty for where it is
            measured to be worth more.
        max_nodes: nodes of a proposal, all its branches together, at most; 0 leaves it to the draft.
        lookahead: nodes that the draft may propose ahead of the target's verdicts, at most; 0 has it wait for
            each verdict, None takes the service's default.
        draft_min: shortest main line that is verified, in tokens.
        draft_p_min: probability below which the draft ends a branch, in [0, 1]; None leaves it to the draft.
        report: whether the stream has notices, and each delta the statistics so far.
    """

    disabled: bool = False
    num_speculative_tokens: int = 0
    acceptance_rule: AcceptanceRule | None = None
    drafter: str = ""
    draft_at: str = ""
    max_nodes: int = 0
    lookahead: int | None = None
    draft_min: int = 0
    draft_p_min: float | None = None
    report: bool = False

    def to_message(self) -> generation_pb2.SpeculationParameters:
        """Return the message."""
        message = generation_pb2.SpeculationParameters(
            disabled=self.disabled,
            num_speculative_tokens=checked_uint32("num_speculative_tokens", self.num_speculative_tokens),
            drafter=self.drafter,
            draft_at=self.draft_at,
            max_nodes=checked_uint32("max_nodes", self.max_nodes),
            lookahead=(None if self.lookahead is None else checked_uint32("lookahead", self.lookahead)),
            draft_min=checked_uint32("draft_min", self.draft_min),
            draft_p_min=self.draft_p_min,
            report=self.report,
        )
        if self.acceptance_rule is not None:
            message.acceptance_rule = wire.rule_to_number(self.acceptance_rule)
        return message


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request; exactly one of `text`, `token_ids` and `messages` is given, or the request raises `InvalidArgument`.

    Attributes:
        text: plain text to continue.
        token_ids: token ids to continue, as they are.
        messages: a conversation's new messages, rendered with the model's chat template; each a `Message` or a mapping
            with its fields.
        parameters: sampling parameters and limits of the output.
        speculation: how to speculate.
        session_id: session to continue or to create; empty lets the service derive one.
        request_id: makes the request idempotent; drawn where it is empty, so that every request can be resumed.
        prediction: what the output is expected to be, such as the file that is to be edited: a text or token ids. It
            changes no token; a `suffix` draft proposes it.
        resume_offset: output tokens already received of a request begun earlier; None for a new request.
        tools: that the model may call, with `messages`; each a `Tool` or a mapping with its fields.
        template_variables: further variables of the chat template, such as `{"enable_thinking": False}`.
        with_parts: whether the stream has the output's parts beside its text: content, reasoning and calls of tools;
            None for where there are tools.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[MessageLike] | None = None
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    speculation: Speculation = field(default_factory=Speculation)
    session_id: str = ""
    request_id: str = ""
    prediction: str | Sequence[int] | None = None
    resume_offset: int | None = None
    tools: Sequence[ToolLike] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    with_parts: bool | None = None

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.text, self.token_ids, self.messages)) != 1:
            raise InvalidArgument("give exactly one of text, token_ids and messages", "prompt")
        for name, kind in (("parameters", SamplingParameters), ("speculation", Speculation)):
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidArgument(f"{name} is of type {type(value).__name__}, must be {kind.__name__}", name)
        # Copies: what the caller does to a list later changes no request.
        for name, checked in (("text", checked_text), ("token_ids", checked_token_ids), ("messages", checked_messages)):
            if (form := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked(name, form))
        object.__setattr__(self, "tools", checked_tools("tools", self.tools))
        for name in ("tools", "template_variables", "with_parts"):
            if getattr(self, name) and self.messages is None:
                raise InvalidArgument(f"{name} goes with messages", name)
        if isinstance(self.prediction, str):
            checked_text("prediction", self.prediction)
        elif self.prediction is not None:
            object.__setattr__(self, "prediction", checked_token_ids("prediction", self.prediction))
        if self.request_id == "":
            if self.resume_offset is not None:
                raise InvalidArgument("request_id is missing: a request is resumed by its id", "request_id")
            # Drawn here: an id that the service drew would be another one for each attempt.
            object.__setattr__(self, "request_id", uuid.uuid4().hex)

    @classmethod
    def of(
        cls,
        prompt: "GenerationRequest | Prompt",
        parameters: SamplingParameters | None = None,
        speculation: Speculation | None = None,
        session_id: str | None = None,
    ) -> "GenerationRequest":
        """Return the request of a prompt in any form; a request is returned as it is.

        Args:
            prompt: a text, token ids, or messages.
            parameters: sampling parameters; None for those of the service and the model.
            speculation: how to speculate; None leaves it to the service.
            session_id: session to continue or to create; None for one of its own.

        Raises:
            InvalidArgument: the prompt has none of these forms, or is a request, which has the other values itself.
        """
        given: dict[str, Any] = {"parameters": parameters, "speculation": speculation, "session_id": session_id}
        given = {name: value for name, value in given.items() if value is not None}
        if not isinstance(prompt, GenerationRequest):
            return cls(**sorted_by_form(prompt), **given)
        for name in given:
            raise InvalidArgument("is given beside a request, which has its own", name)
        return prompt

    def to_message(self) -> generation_pb2.GenerateRequest:
        """Return the message of the first attempt; raise `InvalidArgument` for what no message can carry."""
        self.parameters.check_vocabulary(MAX_UINT32 + 1)
        message = generation_pb2.GenerateRequest(
            request_id=checked_text("request_id", self.request_id),
            session_id=checked_text("session_id", self.session_id),
            parameters=wire.given_to_message(self.parameters),
            speculation=self.speculation.to_message(),
        )
        if self.resume_offset is not None:
            message.resume_offset = checked_uint32("resume_offset", self.resume_offset)
        if isinstance(self.prediction, str):
            message.predicted_text = self.prediction
        elif self.prediction is not None:
            message.predicted_token_ids.CopyFrom(generation_pb2.TokenIds(token_ids=self.prediction))
        if self.text is not None:
            message.text = self.text
        elif self.token_ids is not None:
            message.token_ids.CopyFrom(generation_pb2.TokenIds(token_ids=self.token_ids))
        elif self.messages is not None:
            message.chat.CopyFrom(self._chat())
        return message

    def _chat(self) -> generation_pb2.Chat:
        # The constructor made them so.
        messages, tools = cast(tuple[Message, ...], self.messages), cast(tuple[Tool, ...], self.tools)
        chat = generation_pb2.Chat(
            messages=[message_of(item) for item in messages],
            tools=[generation_pb2.Tool(**tool._asdict()) for tool in tools],
        )
        if self.template_variables:
            try:
                chat.template_variables = json.dumps(dict(self.template_variables))
            except (TypeError, ValueError) as error:
                raise InvalidArgument(f"is no JSON object: {error}", "template_variables") from None
        if self.with_parts or (tools and self.with_parts is None):
            chat.output_parsing.reasoning = True
            chat.output_parsing.tool_calls = bool(tools)
        return chat
