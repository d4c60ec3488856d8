"""Bodies as messages of generation.proto: one for each choice, with the ids and offsets of a stream to resume."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from orchestrator.http.bodies import MAX_CHOICES, Common, Sampling, SpeculationOptions, variables_of
from orchestrator.http.errors import HttpError
from orchestrator.http.messages import ChatMessage, chat_messages
from orchestrator.http.structure import Structure
from orchestrator.http.tools import Tools
from outrider import wire
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from outrider.v1 import generation_pb2, tokens_pb2

_PLAIN: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
_SPECULATION: Final = (
    "disabled",
    "num_speculative_tokens",
    "drafter",
    "draft_at",
    "max_nodes",
    "lookahead",
    "draft_min",
    "draft_p_min",
    "report",
)


@dataclass(frozen=True, slots=True)
class Resumption:
    """The position of a stream that a client continues.

    Attributes:
        request_id: the request; drawn for a new one.
        offsets: output tokens that the client has of each choice; empty for a new request.
    """

    request_id: str
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, last_event_id: str, request_id: str | None, prefix: str) -> "Resumption":
        """Return what the header Last-Event-ID says, else a new request.

        Args:
            last_event_id: the header's value; empty without one.
            request_id: of the body.
            prefix: of ids of this route, such as "chatcmpl-".

        Raises:
            HttpError: the header names no position of such a stream.
        """
        if not last_event_id:
            return cls(secrets.token_hex(16) if request_id is None else request_id)
        name, _, positions = last_event_id.rpartition(":")
        offsets = positions.split(",")
        is_fit = (
            name.startswith(prefix) and name != prefix and all(part.isascii() and part.isdecimal() for part in offsets)
        )
        if not is_fit or any(len(part) > 9 for part in offsets):
            problem = f"Last-Event-ID is not {prefix}ID:OFFSET, as in the id lines of a stream"
            raise HttpError(400, "BadRequestError", problem, "Last-Event-ID", "invalid_argument")
        resumed = name.removeprefix(prefix)
        if request_id is not None and request_id != resumed:
            problem = f"request_id is {request_id!r}, Last-Event-ID has {resumed!r}"
            raise HttpError(400, "BadRequestError", problem, "request_id", "invalid_argument")
        return cls(resumed, tuple(map(int, offsets)))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request, and how to complete each.

    Attributes:
        messages: a message for each prompt, which has only the prompt.
        n: choices of each prompt.
    """

    messages: Sequence[generation_pb2.GenerateRequest]
    n: int = 1
    parameters: tokens_pb2.SamplingParameters = field(default_factory=tokens_pb2.SamplingParameters)
    speculation: generation_pb2.SpeculationParameters = field(default_factory=generation_pb2.SpeculationParameters)
    session_id: str = ""

    def choices(self, resumption: Resumption) -> list[generation_pb2.GenerateRequest]:
        """Return the message of each choice: those of the first prompt, then those of the next.

        Choice 0 of a prompt is what it would be alone; the others have seeds and ids of their own.

        Raises:
            HttpError: there are too many, or none, or a stream with another number of choices is to be resumed.
        """
        num = self.n * len(self.messages)
        if not 1 <= num <= MAX_CHOICES:
            problem = f"{num} completions are requested, must be 1 to {MAX_CHOICES}"
            raise HttpError(400, "BadRequestError", problem, "prompt" if self.n == 1 else "n", "invalid_argument")
        if self.session_id and num > 1:
            problem = "session_id goes with one completion: a session has one text"
            raise HttpError(400, "BadRequestError", problem, "session_id", "invalid_argument")
        if resumption.offsets and len(resumption.offsets) != num:
            problem = f"Last-Event-ID has {len(resumption.offsets)} offsets, the request {num} choices"
            raise HttpError(400, "BadRequestError", problem, "Last-Event-ID", "invalid_argument")
        return [self._choice(index, resumption) for index in range(num)]

    def _choice(self, index: int, resumption: Resumption) -> generation_pb2.GenerateRequest:
        message = generation_pb2.GenerateRequest()
        message.CopyFrom(self.messages[index // self.n])
        message.parameters.CopyFrom(self.parameters)
        message.speculation.CopyFrom(self.speculation)
        message.session_id = self.session_id
        message.request_id = resumption.request_id if index == 0 else f"{resumption.request_id}.{index}"
        if resumption.offsets:
            message.resume_offset = resumption.offsets[index]
        if message.parameters.HasField("seed"):
            message.parameters.seed = _seed_of_choice(message.parameters.seed, index % self.n)
        return message


def _seed_of_choice(seed: int, number: int) -> int:
    """Return the seed of a choice; choice 0 has the request's own."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}.{number}".encode()).digest()[:8], "little")


def parameters_of(body: Sampling, max_tokens: int, logprobs: int | None) -> tokens_pb2.SamplingParameters:
    """Return the sampling parameters that a body gives; what it leaves open has the model's default.

    Args:
        body: the body.
        max_tokens: 0 for as many as fit.
        logprobs: most likely tokens to report of each position; None for none.

    Raises:
        HttpError: a key of `logit_bias` is no token id.
    """
    parameters = tokens_pb2.SamplingParameters(max_tokens=max_tokens)
    for name in _PLAIN:
        if (value := getattr(body, name)) is not None:
            setattr(parameters, name, value)
    if body.top_k is not None:
        parameters.top_k = max(0, body.top_k)
    if body.seed is not None:
        # OpenAI's seeds are signed.
        parameters.seed = body.seed % 2**64
    if logprobs is not None:
        parameters.logprobs = logprobs
    parameters.stop.extend(body.stop or ())
    parameters.stop_token_ids.extend(body.stop_token_ids or ())
    for token_id, bias in (body.logit_bias or {}).items():
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
            problem = f"logit_bias has key {token_id[:40]!r}, must be a token id"
            raise HttpError(400, "BadRequestError", problem, "logit_bias", "invalid_argument")
        parameters.logit_bias[int(token_id)] = bias
    return parameters


def speculation_of(options: SpeculationOptions | None) -> generation_pb2.SpeculationParameters:
    """Return how a request speculates."""
    message = generation_pb2.SpeculationParameters()
    if options is None:
        return message
    for name in _SPECULATION:
        if (value := getattr(options, name)) is not None:
            setattr(message, name, value)
    if options.acceptance_rule is not None:
        message.acceptance_rule = wire.rule_to_number(AcceptanceRule(options.acceptance_rule))
    return message


def chat_prompt(
    messages: Sequence[ChatMessage],
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    *,
    continues: bool = False,
    tools: Tools | None = None,
) -> generation_pb2.GenerateRequest:
    """Return the prompt of a conversation; `continues` where a session may hold its beginning; raise `HttpError`."""
    chat = generation_pb2.Chat(template_variables=variables_of(variables), with_history=continues)
    if add_generation_prompt is not None:
        chat.add_generation_prompt = add_generation_prompt
    chat.messages.extend(chat_messages(messages))
    if tools is not None:
        tools.add_to(chat)
    return generation_pb2.GenerateRequest(chat=chat)


def text_prompts(
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> list[generation_pb2.GenerateRequest]:
    """Return the prompts of a completion: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [generation_pb2.GenerateRequest(text=prompt)]
    if prompt and isinstance(prompt[0], int):
        return [_token_prompt(prompt)]
    return [
        generation_pb2.GenerateRequest(text=item) if isinstance(item, str) else _token_prompt(item) for item in prompt
    ]


def _token_prompt(token_ids: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(token_ids=token_ids))


def prompts_of(
    body: Common,
    messages: Sequence[generation_pb2.GenerateRequest],
    max_tokens: int,
    logprobs: int | None,
    structure: Structure | None,
) -> Prompts:
    """Return the prompts of a body with its parameters, and what its outputs must follow."""
    parameters = parameters_of(body, max_tokens, logprobs)
    if structure is not None:
        parameters.constraint.CopyFrom(wire.constraint_to_message(structure.constraint))
    return Prompts(
        messages,
        body.n or 1,
        parameters,
        speculation_of(body.speculation),
        body.session_id or "",
    )


def timeout_of(value: str) -> float | None:
    """Return the bound of a request in seconds, from the header X-Request-Timeout; None without one.

    Raises:
        InvalidArgument: it is no number of seconds.
    """
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise InvalidArgument(
            f"X-Request-Timeout is {value[:40]!r}, must be seconds, at most 86400", "X-Request-Timeout"
        )
    return seconds
