"""Prompts in their three forms: measured before anything is done with them, then made token ids."""

from dataclasses import dataclass
from typing import Final

from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2

_MAX_MESSAGES: Final = 2048
"""Chat messages of a request; templates are rendered message by message, and this many take some 30 ms."""


@dataclass(frozen=True, slots=True)
class PromptTerms:
    """What a request's prompt is added to.

    Attributes:
        tokenizer: the target's; None where it has none.
        vocabulary_size: token ids are below it.
        max_tokens: that the session has room for.
        continues: whether the session exists.
        last_token: the session's last token; None for a new one.
    """

    tokenizer: Tokenizer | None
    vocabulary_size: int
    max_tokens: int
    continues: bool = False
    last_token: int | None = None


def check_prompt(message: generation_pb2.GenerateRequest, terms: PromptTerms) -> int:
    """Returns about how many characters a prompt has, where so many can fit.

    Raises:
        InvalidArgument: it is missing, cannot be read by this model, or cannot fit.
    """
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        return _check_num_tokens(len(message.token_ids.token_ids), terms)
    if terms.tokenizer is None:
        raise InvalidArgument("the model has no tokenizer: give token_ids", str(kind))
    if kind == "text":
        num_chars = len(message.text)
    else:
        num_messages = len(message.chat.messages)
        if not num_messages:
            raise InvalidArgument("chat has no messages", "chat")
        if num_messages > _MAX_MESSAGES:
            raise InvalidArgument(f"chat has {num_messages} messages, may have at most {_MAX_MESSAGES}", "chat")
        num_chars = sum(len(item.content) for item in message.chat.messages)
    terms.tokenizer.check_length(num_chars, terms.max_tokens)
    return num_chars


def prompt_tokens(message: generation_pb2.GenerateRequest, terms: PromptTerms) -> tuple[int, ...]:
    """Returns the token ids that a request adds to its session; it has passed `check_prompt`.

    Raises:
        InvalidArgument: the prompt is empty, or cannot be read.
    """
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        token_ids = tuple(message.token_ids.token_ids)
        if (highest := max(token_ids, default=0)) >= terms.vocabulary_size:
            raise InvalidArgument(f"token_ids has {highest}, the vocabulary has {terms.vocabulary_size}", "token_ids")
    elif terms.tokenizer is None:
        raise InvalidArgument("the model has no tokenizer: give token_ids", str(kind))
    elif kind == "text":
        token_ids = tuple(terms.tokenizer.encode(message.text, terms.max_tokens))
    else:
        messages = [(item.role, item.content) for item in message.chat.messages]
        token_ids = tuple(
            terms.tokenizer.encode_chat(
                messages, continues=terms.continues, last_token=terms.last_token, max_tokens=terms.max_tokens
            )
        )
    if not token_ids:
        raise InvalidArgument("the prompt is empty", str(kind))
    return token_ids


def _check_num_tokens(num_tokens: int, terms: PromptTerms) -> int:
    if num_tokens > terms.max_tokens:
        raise InvalidArgument(f"prompt has {num_tokens} tokens, the session has room for {terms.max_tokens}", "prompt")
    return num_tokens
