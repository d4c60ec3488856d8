"""The part of a conversation's messages that a session does not hold yet, compared as text."""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.text.tokenizer import Messages, Tokenizer
from outrider.errors import SessionConflict


def messages_behind(
    tokenizer: Tokenizer, messages: Messages, held: Sequence[int], variables: Mapping[str, Any], max_tokens: int
) -> Messages:
    """Return the messages that follow those that a session holds.

    Messages without an answer of the assistant are new ones, all of them. Others begin with what the session holds,
    up to the answer that ends it, whether or not that answer was complete. White space beside special tokens does not
    count, because templates strip contents.

    Args:
        tokenizer: of the model.
        messages: (role, content), oldest first.
        held: the session's token ids.
        variables: of the chat template.
        max_tokens: tokens of the longest conversation that fits.

    Raises:
        SessionConflict: the messages contradict the session.
        InvalidArgument: the template refuses them, or they are far too long.
    """
    ends = [number for number, (role, _) in enumerate(messages, start=1) if role == "assistant"]
    if not ends:
        return messages
    edges = re.compile(rf"\s*({'|'.join(map(re.escape, tokenizer.special_tokens)) or '(?!)'})\s*")

    def stripped(text: str) -> str:
        return edges.sub(r"\1", text)

    def text_until(end: int) -> str:
        return stripped(tokenizer.decode(tokenizer.encode_history(messages[:end], variables, max_tokens)))

    text = stripped(tokenizer.decode(held))
    # A longer conversation has a longer text, so the answer that ends the session is found in a few renderings.
    index = bisect.bisect_left(ends, len(text), key=lambda end: len(text_until(end)))
    if index == len(ends):
        raise SessionConflict("the messages have less than the session holds")
    end = ends[index]
    whole = text_until(end)
    # An answer that was cut short lacks what the template writes behind answers.
    behind = stripped(tokenizer.text_behind_answer(messages[: end - 1], variables))
    if not whole.startswith(text) or not behind.endswith(whole[len(text) :]):
        raise SessionConflict("the messages do not begin with what the session holds")
    return messages[end:]
