"""The part of a conversation's messages that a session does not hold yet, compared as text."""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.text.messages import Message, Messages, Tool
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
    count, because templates strip contents; nor does reasoning, which templates leave out of earlier answers; nor any
    white space where there are calls of tools, because clients write their JSON anew.

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
    comparable = _Comparable(tokenizer, has_calls=any(message.tool_calls for message in whole))

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
    """Makes texts of one conversation equal where their differences mean nothing."""

    def __init__(self, tokenizer: Tokenizer, *, has_calls: bool) -> None:
        special = "|".join(map(re.escape, tokenizer.special_tokens)) or "(?!)"
        self._edges = re.compile(rf"\s*({special})\s*")
        region = tokenizer.output_format.template.reasoning
        opens, closes = (region.opens, region.closes) if region else (None, None)
        is_plain = opens is not None and closes is not None and opens.literals and closes.literals
        self._reasoning = (
            re.compile(f"(?:{opens.pattern.pattern}).*?(?:{closes.pattern.pattern}|\\Z)\\s*", re.DOTALL)
            if is_plain and opens and closes
            else None
        )
        self._has_calls = has_calls

    def of(self, text: str) -> str:
        """Return the text that is compared."""
        if self._reasoning is not None:
            text = self._reasoning.sub("", text)
        text = self._edges.sub(r"\1", text)
        return re.sub(r"\s+", "", text) if self._has_calls else text
