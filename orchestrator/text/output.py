"""A request's output: detokenization, stop strings and parts, a pure function of the output's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import tokenizers

from orchestrator.text.output_parts import OutputParts
from orchestrator.text.parts import Part, merged
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters

_MAX_WINDOW: Final = 256
"""Tokens that may wait for their text to become certain; far more than any character needs."""


@dataclass(frozen=True, slots=True)
class Absorbed:
    """The part of some tokens that belongs to the output.

    Attributes:
        num_tokens: number of these tokens; the last one completed a stop string where `stopped`.
        text: the text that became certain with them.
        stopped: whether a stop string ended the output.
        texts: the part of `text` that became certain with each token; empty for a model without a tokenizer.
        parts: the parts that became certain with them; empty where the output is not taken apart.
    """

    num_tokens: int
    text: str
    stopped: bool
    texts: Sequence[str] = ()
    parts: Sequence[Part] = ()


class Ending(NamedTuple):
    """What becomes certain with an output's end.

    Attributes:
        text: the rest of the text.
        parts: the rest of the parts.
        num_calls: calls of tools in the whole output.
        num_reasoning_tokens: tokens of the reasoning in the whole output.
    """

    text: str
    parts: Sequence[Part] = ()
    num_calls: int = 0
    num_reasoning_tokens: int = 0


class OutputText:
    """The text of one request's output; it depends on the tokens only, so a resumed stream continues exactly.

    Args:
        tokenizer: None for a model without one, whose output has no text.
        parameters: stop strings and `min_tokens`.
        parts: takes the output apart; None where that is not requested.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, parameters: SamplingParameters, parts: OutputParts | None = None
    ) -> None:
        check_stop_strings(tokenizer, parameters)
        self._detokenizer = Detokenizer(tokenizer.backend, tokenizer.unsettled_tokens) if tokenizer else None
        self._stops = StopStrings(parameters.stop)
        self._min_tokens = parameters.min_tokens
        self._parts = parts
        self.num_tokens = 0

    def absorb(self, token_ids: Sequence[int]) -> Absorbed:
        """Take tokens, up to the one that completes a stop string."""
        if self._detokenizer is None:
            self.num_tokens += len(token_ids)
            return Absorbed(len(token_ids), "", False)
        texts: list[str] = []
        parts: list[Part] = []
        stopped = False
        for token_id in token_ids:
            passed = self._pass(self._detokenizer, token_id)
            texts.append(passed.text)
            if self._parts is not None:
                # Token by token, however many come at once.
                parts += self._parts.push(passed.text)
                self._parts.end_token()
            if stopped := passed.stopped:
                break
        return Absorbed(len(texts), "".join(texts), stopped, texts, merged(parts))

    def finish(self, *, stopped: bool) -> Ending:
        """Return what becomes certain with the end; no text after a stop string."""
        text = "" if stopped or self._detokenizer is None else self._rest(self._detokenizer)
        if self._parts is None:
            return Ending(text)
        parts = merged([*self._parts.push(text), *self._parts.finish()])
        return Ending(text, parts, self._parts.num_calls, self._parts.num_reasoning_tokens)

    def _pass(self, detokenizer: "Detokenizer", token_id: int) -> "Passed":
        """Return the text that passes with a token."""
        self.num_tokens += 1
        if self._parts is not None and self._parts.is_marker(token_id):
            self._parts.mark(token_id, detokenizer.num_chars)
        piece = detokenizer.push(token_id)
        if self.num_tokens <= self._min_tokens:
            return Passed(self._stops.skip(piece), False)
        return self._stops.push(piece)

    def _rest(self, detokenizer: "Detokenizer") -> str:
        passed = self._stops.push(detokenizer.flush())
        return passed.text if passed.stopped else passed.text + self._stops.flush()


def check_stop_strings(tokenizer: Tokenizer | None, parameters: SamplingParameters) -> None:
    """Raise `InvalidArgument` for stop strings on a model without a tokenizer."""
    if tokenizer is None and parameters.stop:
        raise InvalidArgument("the model has no tokenizer, so there is no text to stop at", "stop")


class Passed(NamedTuple):
    """Text that is certain, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopStrings:
    """A filter that ends text at the first stop string, and holds back an end that may become one.

    Args:
        stops: the strings; none passes all text at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> Passed:
        """Add text; where several stop strings end with it, the one that begins first cuts the text."""
        if not self._stops:
            return Passed(piece, False)
        self._held += piece
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            text, self._held = self._held[: min(starts)], ""
            return Passed(text, True)
        return Passed(self._release(), False)

    def skip(self, piece: str) -> str:
        """Add text in which no stop string counts (before `min_tokens`); one may begin in it and end later."""
        if not self._stops:
            return piece
        self._held += piece
        return self._release()

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        text, self._held = self._held, ""
        return text

    def _release(self) -> str:
        """Remove and return the held text, except an end that may become a stop string."""
        split = len(self._held) - self._num_possible()
        text, self._held = self._held[:split], self._held[split:]
        return text

    def _num_possible(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for num in range(longest, 0, -1):
            if any(stop.startswith(self._held[-num:]) for stop in self._stops):
                return num
        return 0


class Detokenizer:
    """An incremental detokenizer; its text is a pure function of the tokens pushed so far.

    A piece is returned once no later token can change it, so the concatenation of all pieces is the text of all tokens,
    special tokens left out, also where bytes are no valid UTF-8. (`tokenizers.decoders.DecodeStream` raises there, for
    tokenizers with byte fallback.) Only a run of 256 tokens without any certain text is cut short.

    Args:
        tokenizer: decodes.
        unsettled_tokens: ids of the tokens after which text is never certain; see `unsettled_tokens_of`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, unsettled_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._unsettled_tokens = unsettled_tokens
        # Some decoders treat the first token differently, so the tokens returned last are decoded again with new ones.
        self._window: list[int] = []
        self._num_returned = 0
        self._returned = ""
        self._num_chars = 0

    @property
    def num_chars(self) -> int:
        """Characters of all tokens pushed so far, those included that later tokens may change."""
        return self._num_chars + len(self._text()) - len(self._returned)

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token."""
        self._window.append(token_id)
        is_full = len(self._window) - self._num_returned >= _MAX_WINDOW
        # Byte fallback decodes a run of bytes as a whole: one wrong byte after a character undoes the character.
        if token_id in self._unsettled_tokens and not is_full:
            return ""
        text = self._text()
        if text.endswith("\ufffd") and not is_full:
            return ""
        return self._release(text) if len(text) > len(self._returned) or is_full else ""

    def flush(self) -> str:
        """Return the text that the end makes certain: an incomplete character becomes U+FFFD."""
        return self._release(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True)

    def _release(self, text: str) -> str:
        piece = text[len(self._returned) :]
        self._num_chars += len(piece)
        del self._window[: self._num_returned]
        self._num_returned = len(self._window)
        self._returned = self._text()
        return piece
