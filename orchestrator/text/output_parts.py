"""The parts of a request's output, from its text and the special tokens within it that mark them."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.text.messages import Tool
from orchestrator.text.parts import Part
from orchestrator.text.reasoning import MAX_PROMPT_TOKENS
from orchestrator.text.response_parser import ResponseParser
from orchestrator.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Parsing:
    """How an output is taken apart.

    Attributes:
        reasoning: whether the reasoning is a part of its own.
        calls: whether calls of tools are.
        tools: of the request.
    """

    reasoning: bool
    calls: bool
    tools: Sequence[Tool] = ()


class OutputParts:
    """The parts of one output; they depend on its tokens only.

    Text has no special tokens, but some of them mark parts: those go to the parser at their place within the text.

    Args:
        tokenizer: of the model.
        parsing: what is taken apart.
        prompt: token ids of the prompt, or its end.
        end_token_ids: tokens that end an output, which mark nothing.

    Attributes:
        num_reasoning_tokens: tokens of the reasoning so far, its end included.
    """

    def __init__(
        self, tokenizer: Tokenizer, parsing: Parsing, prompt: Sequence[int], end_token_ids: Collection[int]
    ) -> None:
        form = tokenizer.output_format
        self._parser = ResponseParser(
            form.template,
            {tool.name: tool.parameters for tool in parsing.tools},
            reasoning=parsing.reasoning,
            calls=parsing.calls,
            needs_tool=form.needs_tool,
        )
        self._parser.prime(tokenizer.decode(prompt[-MAX_PROMPT_TOKENS:]))
        self._markers = {
            token_id: text for token_id, text in tokenizer.marker_tokens.items() if token_id not in end_token_ids
        }
        self.num_reasoning_tokens = 0
        self._is_reasoning = self._parser.is_reasoning
        self._waiting: deque[tuple[int, str]] = deque()
        self._num_chars = 0

    @property
    def num_calls(self) -> int:
        """Calls of tools so far."""
        return self._parser.num_calls

    def is_marker(self, token_id: int) -> bool:
        """Return whether a token is a special one that marks a part."""
        return token_id in self._markers

    def mark(self, token_id: int, position: int) -> None:
        """Take a marker; `position` is the number of characters ahead of it, some of which are yet to be pushed."""
        self._waiting.append((position, self._markers[token_id]))

    def push(self, text: str) -> list[Part]:
        """Return the parts that became certain with more text, and the markers up to its end."""
        parts: list[Part] = []
        end = self._num_chars + len(text)
        while self._waiting and self._waiting[0][0] <= end:
            position, marker = self._waiting.popleft()
            cut = max(0, position - self._num_chars)
            parts += self._parser.push(text[:cut])
            parts += self._parser.push(marker)
            text, self._num_chars = text[cut:], self._num_chars + cut
        self._num_chars = end
        return parts + self._parser.push(text)

    def end_token(self) -> None:
        """Take note that all text of a token was pushed."""
        was_reasoning, self._is_reasoning = self._is_reasoning, self._parser.is_reasoning
        self.num_reasoning_tokens += was_reasoning or self._is_reasoning

    def finish(self) -> list[Part]:
        """Return the parts that become certain with the end; markers behind it mark nothing."""
        return self._parser.finish()
