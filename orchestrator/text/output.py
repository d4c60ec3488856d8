"""A request's output text: detokenization and stop strings, a pure function of the output's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import tokenizers

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
    """

    num_tokens: int
    text: str
    stopped: bool
    texts: Sequence[str] = ()


class OutputText:
    """The text of one request's output; it depends on the tokens only, so a resumed stream continues exactly.

    Args:
        tokenizer: None for a model without one, whose output has no text.
        parameters: stop strings and `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer | None, parameters: SamplingParameters) -> None:
        check_stop_strings(tokenizer, parameters)
        self._detokenizer = Detokenizer(tokenizer.backend, tokenizer.unsettled_tokens) if tokenizer else None
        self._stops = StopStrings(parameters.stop)
        self._min_tokens = parameters.min_tokens
        self.num_tokens = 0

    def absorb(self, token_ids: Sequence[int]) -> Absorbed:
        """Take tokens, up to the one that completes a stop string."""
        if self._detokenizer is None:
            self.num_tokens += len(token_ids)
            return Absorbed(len(token_ids), "", False)
        texts: list[str] = []
        for num, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            piece = self._detokenizer.push(token_id)
            if self.num_tokens <= self._min_tokens:
                texts.append(self._stops.skip(piece))
                continue
            passed = self._stops.push(piece)
            texts.append(passed.text)
            if passed.stopped:
                return Absorbed(num, "".join(texts), True, texts)
        return Absorbed(len(token_ids), "".join(texts), False, texts)

    def finish(self, *, stopped: bool) -> str:
        """Return the text that becomes certain with the end; none after a stop string."""
        if stopped or self._detokenizer is None:
            return ""
        passed = self._stops.push(self._detokenizer.flush())
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
        del self._window[: self._num_returned]
        self._num_returned = len(self._window)
        self._returned = self._text()
        return piece
