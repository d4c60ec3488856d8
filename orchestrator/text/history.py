"""The part of a conversation's messages that a session does not hold yet, compared as text."""

import bisect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.text.messages import Message, Messages, Tool
from orchestrator.text.parts import CallPiece, Content
from orchestrator.text.response_parser import ResponseParser
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import SessionConflict


def messages_behind(
    tokenizer: Tokenizer,
    messages: Messages,
    held: Sequence[int],
    variables: Mapping[str, Any],
    max_tokens: int,
    tools: Sequence[Tool] = (),
) -> Messages:
    """Return the messages that follow those that a session holds.

    Messages without an answer of the assistant are new ones, all of them. Others begin with what the session holds,
    up to the answer that ends it, whether or not that answer was complete. White space beside special tokens does not
    count, because templates strip contents; nor does the reasoning of answers, which templates leave out of earlier
    ones; and calls of tools are compared by their names and values, because clients and templates write them anew.

    Args:
        tokenizer: of the model.
        messages: oldest first.
        held: the session's token ids.
        variables: of the chat template.
        max_tokens: tokens of the longest conversation that fits.
        tools: that the session was told of.

    Raises:
        SessionConflict: the messages contradict the session.
        InvalidArgument: the template refuses them, or they are far too long.
    """
    whole = [Message(*message) for message in messages]
    ends = [number for number, message in enumerate(whole, start=1) if message.role == "assistant"]
    if not ends:
        return messages
    has_calls = any(message.tool_calls for message in whole)
    comparable = _Comparable(tokenizer, tokenizer.answer_begin(variables), tools, has_calls=has_calls)

    def text_until(end: int) -> str:
        return comparable.of(tokenizer.decode(tokenizer.encode_history(whole[:end], variables, max_tokens, tools)))

    text = comparable.of(tokenizer.decode(held))
    # A longer conversation has a longer text, so the answer that ends the session is found in a few renderings.
    index = bisect.bisect_left(ends, len(text), key=lambda end: len(text_until(end)))
    if index == len(ends):
        raise SessionConflict("the messages have less than the session holds")
    end = ends[index]
    known = text_until(end)
    # An answer that was cut short lacks what the template writes behind answers.
    behind = comparable.of(tokenizer.text_behind_answer(whole[: end - 1], variables, tools))
    if not known.startswith(text) or not behind.endswith(known[len(text) :]):
        raise SessionConflict("the messages do not begin with what the session holds")
    return messages[end:]


class _Comparable:
    """Makes texts of one conversation equal where their differences mean nothing.

    Args:
        tokenizer: of the model.
        begin: what the template writes ahead of answers.
        tools: that answers may call.
        has_calls: whether any answer does.
    """

    def __init__(self, tokenizer: Tokenizer, begin: str, tools: Sequence[Tool], *, has_calls: bool) -> None:
        special = "|".join(map(re.escape, tokenizer.special_tokens)) or "(?!)"
        self._edges = re.compile(rf"\s*({special})\s*")
        self._form = tokenizer.output_format
        # What an answer cannot have within itself ends it.
        ends = [token for token in tokenizer.special_tokens if not self._form.template.has_anchor(token)]
        self._ends = re.compile("|".join(map(re.escape, (begin, *ends))))
        self._begin = begin
        self._tools = {tool.name: tool.parameters for tool in tools}
        self._has_calls = has_calls
        self._known: dict[str, str] = {}

    def of(self, text: str) -> str:
        """Return the text that is compared."""
        text = self._edges.sub(r"\1", "".join(self._pieces(text)))
        return re.sub(r"\s+", "", text) if self._has_calls else text

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield the text with answers in a form of their own, without those that are empty within one."""
        position = 0
        while self._begin and (start := text.find(self._begin, position)) >= 0:
            yield text[position:start]
            position = start + len(self._begin)
            found = self._ends.search(text, position)
            end = found.start() if found is not None else len(text)
            answer = self._answer(text[position:end])
            position = end
            # Some models write reasoning and content as two answers.
            if answer or not text.startswith(self._begin, end):
                yield self._begin + answer
        yield text[position:]

    def _answer(self, text: str) -> str:
        """Return an answer without its reasoning, and its calls as JSON of their names and values."""
        if text not in self._known:
            form = self._form
            parser = ResponseParser(form.template, self._tools, reasoning=True, calls=True, needs_tool=form.needs_tool)
            content: list[str] = []
            calls: dict[int, list[str]] = {}
            for part in (*parser.push(text), *parser.finish()):
                match part:
                    case Content(said):
                        content.append(said)
                    case CallPiece(index, name, arguments):
                        call = calls.setdefault(index, ["", ""])
                        call[0] += name
                        call[1] += arguments
            told = [f"{name} {_canonical(arguments)}" for name, arguments in calls.values()]
            self._known[text] = "\n".join(["".join(content).strip(), *told])
        return self._known[text]


def _canonical(arguments: str) -> str:
    """Return the arguments of a call as they are compared: values in one order, and texts of values as the values."""
    try:
        value = json.loads(arguments)
        if isinstance(value, dict):
            value = {name: _read(item) for name, item in value.items()}
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _read(value: Any) -> Any:
    """Return the value that a text stands for, in JSON or in Python, as templates write values that are no texts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(value, value)
