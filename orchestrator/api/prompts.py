"""Prompts in their three forms: checked by their size, then encoded to token ids; see `encoding_threads`."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from orchestrator.text.history import messages_behind
from orchestrator.text.messages import MAX_TOOLS, Call, Message, Tool, call_arguments, checked_tool, json_object
from orchestrator.text.output_parts import Parsing
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import InvalidArgument, OutriderError
from outrider.v1 import generation_pb2

MAX_MESSAGES: Final = 2048
"""Chat messages of a request; templates are rendered message by message, and this many take some 30 ms."""
MAX_CALLS: Final = 128
"""Calls of tools of a message."""
_MAX_TOOLS_CHARS: Final = 1 << 18
"""Characters of all tools; their schemas are read beside the requests that run, and this many take some 10 ms."""
_MAX_VARIABLES_CHARS: Final = 16384


@dataclass(frozen=True, slots=True)
class PromptTerms:
    """The model and the session that a prompt is encoded for.

    Attributes:
        tokenizer: the target's; None where it has none.
        vocabulary_size: token ids are below it.
        max_tokens: room of the session.
        continues: whether the session exists.
        last_token: the session's last token; None for a new one.
        held: all tokens of the session, where the messages may repeat what it holds.
    """

    tokenizer: Tokenizer | None
    vocabulary_size: int
    max_tokens: int
    continues: bool = False
    last_token: int | None = None
    held: Sequence[int] = ()


class EncodedPrompt(NamedTuple):
    """A prompt as a session has it.

    Attributes:
        token_ids: that it adds to the session.
        parsing: how the output is taken apart; None for not at all.
    """

    token_ids: tuple[int, ...]
    parsing: Parsing | None = None


def check_prompt(message: generation_pb2.GenerateRequest, terms: PromptTerms) -> int:
    """Return about how many characters a prompt has, where so many can fit.

    Raises:
        InvalidArgument: it is missing, cannot be encoded for this model, or cannot fit.
    """
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        return _check_num_tokens(len(message.token_ids.token_ids), terms)
    if terms.tokenizer is None:
        raise InvalidArgument("the model has no tokenizer: give token_ids", str(kind))
    if kind == "text":
        num_chars = len(message.text)
    else:
        num_chars = check_chat(message.chat)
        if terms.held:
            # They may repeat the whole session.
            terms.tokenizer.check_length(num_chars, terms.max_tokens + len(terms.held))
            return num_chars
    terms.tokenizer.check_length(num_chars, terms.max_tokens)
    return num_chars


def check_chat(chat: generation_pb2.Chat) -> int:
    """Return about how many characters a chat has; raise `InvalidArgument` where something is too much."""
    if not (num_messages := len(chat.messages)):
        raise InvalidArgument("chat has no messages", "chat")
    if num_messages > MAX_MESSAGES:
        raise InvalidArgument(f"chat has {num_messages} messages, may have at most {MAX_MESSAGES}", "chat")
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidArgument(f"tools has {len(chat.tools)} tools, may have at most {MAX_TOOLS}", "tools")
    if (most := max(len(item.tool_calls) for item in chat.messages)) > MAX_CALLS:
        raise InvalidArgument(f"tool_calls has {most} calls, may have at most {MAX_CALLS}", "tool_calls")
    if len(chat.template_variables) > _MAX_VARIABLES_CHARS:
        raise InvalidArgument(f"may have at most {_MAX_VARIABLES_CHARS} characters", "template_variables")
    num_chars = sum(len(tool.name) + len(tool.description) + len(tool.parameters) for tool in chat.tools)
    if num_chars > _MAX_TOOLS_CHARS:
        raise InvalidArgument(f"tools has {num_chars} characters, may have at most {_MAX_TOOLS_CHARS}", "tools")
    return num_chars + sum(_num_chars(item) for item in chat.messages)


def _num_chars(message: generation_pb2.ChatMessage) -> int:
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning) + len(message.tool_call_id) + len(message.name) + calls


def encoded_prompt(message: generation_pb2.GenerateRequest, terms: PromptTerms) -> EncodedPrompt:
    """Return the prompt that a request adds to its session; it has passed `check_prompt`.

    Raises:
        InvalidArgument: the prompt is empty, or cannot be encoded.
    """
    kind = message.WhichOneof("prompt")
    parsing: Parsing | None = None
    if kind == "token_ids":
        token_ids = tuple(message.token_ids.token_ids)
        if (highest := max(token_ids, default=0)) >= terms.vocabulary_size:
            raise InvalidArgument(f"token_ids has {highest}, the vocabulary has {terms.vocabulary_size}", "token_ids")
    elif terms.tokenizer is None:
        raise InvalidArgument("the model has no tokenizer: give token_ids", str(kind))
    elif kind == "text":
        token_ids = tuple(terms.tokenizer.encode(message.text, terms.max_tokens))
    else:
        tools = _tools(message.chat)
        token_ids = tuple(_chat_tokens(message.chat, tools, terms.tokenizer, terms))
        parsing = _parsing(message.chat, tools)
    if not token_ids:
        raise InvalidArgument("the prompt is empty", str(kind))
    return EncodedPrompt(token_ids, parsing)


def prediction_chars(message: generation_pb2.GenerateRequest, tokenizer: Tokenizer | None, max_tokens: int) -> int:
    """Return about how many characters a prediction has; 0 without one.

    Raises:
        InvalidArgument: it cannot be encoded for this model, or is longer than any output.
    """
    kind = message.WhichOneof("prediction")
    if kind is None:
        return 0
    if kind == "predicted_token_ids":
        if (num := len(message.predicted_token_ids.token_ids)) > max_tokens:
            raise InvalidArgument(f"prediction has {num} tokens, may have {max_tokens}", "prediction")
        return num
    if tokenizer is None:
        raise InvalidArgument("the model has no tokenizer: give predicted_token_ids", "prediction")
    with _about_prediction():
        tokenizer.check_length(len(message.predicted_text), max_tokens)
    return len(message.predicted_text)


def prediction_tokens(
    message: generation_pb2.GenerateRequest, tokenizer: Tokenizer | None, vocabulary_size: int, max_tokens: int
) -> tuple[int, ...]:
    """Return the token ids of a prediction, which has passed `prediction_chars`; raise `InvalidArgument`."""
    if message.WhichOneof("prediction") == "predicted_token_ids":
        token_ids = tuple(message.predicted_token_ids.token_ids)
        if (highest := max(token_ids, default=0)) >= vocabulary_size:
            raise InvalidArgument(f"prediction has {highest}, the vocabulary has {vocabulary_size}", "prediction")
        return token_ids
    assert tokenizer is not None
    with _about_prediction():
        token_ids = tuple(tokenizer.encode_answer(message.predicted_text, max_tokens))
    if len(token_ids) > max_tokens:
        raise InvalidArgument(f"prediction has {len(token_ids)} tokens, may have {max_tokens}", "prediction")
    return token_ids


@contextlib.contextmanager
def _about_prediction() -> Iterator[None]:
    """Name the field in errors of the tokenizer, which speaks of prompts."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(error.message.replace("prompt", "prediction", 1), "prediction") from error


def may_repeat_session(message: generation_pb2.GenerateRequest) -> bool:
    """Return whether a request's messages may begin with those that the session holds."""
    return message.chat.with_history and any(item.role == "assistant" for item in message.chat.messages)


def parsing_of(chat: generation_pb2.Chat) -> Parsing | None:
    """Return how a chat's output is taken apart; None for not at all.

    Tools may be many: call it in a thread, after `check_chat`.

    Raises:
        InvalidArgument: a tool is wrong.
    """
    return _parsing(chat, _tools(chat) if chat.output_parsing.tool_calls else ())


def _parsing(chat: generation_pb2.Chat, tools: Sequence[Tool]) -> Parsing | None:
    wanted = chat.output_parsing
    if not (wanted.reasoning or wanted.tool_calls):
        return None
    return Parsing(wanted.reasoning, wanted.tool_calls, tools if wanted.tool_calls else ())


def _chat_tokens(
    chat: generation_pb2.Chat, tools: Sequence[Tool], tokenizer: Tokenizer, terms: PromptTerms
) -> list[int]:
    messages = [_message(item) for item in chat.messages]
    try:
        return _rendered_tokens(chat, messages, tools, tokenizer, terms)
    except Exception as error:
        # Errors of values are told of the tools or the variables, where there are any.
        is_told = isinstance(error, OutriderError) and getattr(error, "field", "") not in (
            "tools",
            "template_variables",
        )
        if is_told or not any(isinstance(call_arguments(call), str) for item in messages for call in item.tool_calls):
            raise
        problem = "the chat template takes no call whose arguments are not a JSON object"
        raise InvalidArgument(problem, "chat") from error


def _rendered_tokens(
    chat: generation_pb2.Chat,
    messages: Sequence[Message | tuple[str, str]],
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    terms: PromptTerms,
) -> list[int]:
    variables = _variables(chat)
    answer: Message | None = None
    if terms.held:
        most, given = terms.max_tokens + len(terms.held), messages
        messages = messages_behind(tokenizer, given, terms.held, variables, most, tools)
        if not messages:
            raise InvalidArgument("the session holds all messages already", "messages")
        if num_known := len(given) - len(messages):
            answer = Message(*given[num_known - 1])
    return tokenizer.encode_chat(
        messages,
        continues=terms.continues,
        last_token=terms.last_token,
        max_tokens=terms.max_tokens,
        variables=variables,
        prompts=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        tools=tools,
        answer=answer,
    )


def _message(item: generation_pb2.ChatMessage) -> Message:
    calls = tuple(Call(call.id, call.name, call.arguments) for call in item.tool_calls)
    return Message(item.role, item.content, item.reasoning, calls, item.tool_call_id, item.name)


def _tools(chat: generation_pb2.Chat) -> list[Tool]:
    tools = [checked_tool(tool.name, tool.description, tool.parameters) for tool in chat.tools]
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidArgument("tools has two tools of one name", "tools")
    return tools


def _variables(chat: generation_pb2.Chat) -> dict[str, Any]:
    """Return the variables that a chat gives its template; raise `InvalidArgument` where they are no JSON object."""
    return json_object(chat.template_variables, "template_variables", "it") if chat.template_variables else {}


def _check_num_tokens(num_tokens: int, terms: PromptTerms) -> int:
    if num_tokens > terms.max_tokens:
        raise InvalidArgument(f"prompt has {num_tokens} tokens, the session has room for {terms.max_tokens}", "prompt")
    return num_tokens
