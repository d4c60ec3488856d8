"""A matcher that follows one request's output."""

from collections.abc import Callable, Sequence
from typing import Final

from llguidance import LLMatcher

from outrider.errors import ConstraintFailed
from outrider.grammar.source import one_line

_PIECE: Final = 4
"""Tokens that are consumed between two masks. Each mask renews the work that the library's lexer may do; in plain
decoding there is one before each token, and what is replayed must not have less."""


class OutputMatcher:
    """Knows what may follow an output. Not thread-safe.

    Its state follows from the output alone: `follow` goes back and on along the tokens, as sessions do. It never uses
    the library's own `rollback`: in llguidance 1.9.1 another text after it may meet the masks of the first (where white
    space is free), or other masks than it should (where the grammar names tokens by their ids).

    Args:
        begin: returns a new matcher at the beginning of an output.
    """

    def __init__(self, begin: Callable[[], LLMatcher]) -> None:
        self._begin = begin
        self._matcher = begin()
        self._followed: list[int] = []

    @property
    def native(self) -> LLMatcher:
        """The library's matcher, after the output that was followed last; to be read only."""
        return self._matcher

    def follow(self, output: Sequence[int]) -> None:
        """Come to the state after an output.

        Args:
            output: all tokens of the request's output so far.

        Raises:
            ConstraintFailed: the grammar does not allow it, or exceeds a bound.
        """
        if list(output[: len(self._followed)]) != self._followed:
            self._matcher, self._followed = self._begin(), []
        rest = list(output[len(self._followed) :])
        for start in range(0, len(rest), _PIECE):
            if start:
                self._matcher.compute_bitmask()
            self._matcher.consume_tokens(rest[start : start + _PIECE])
        self._followed += rest
        self.check()

    def num_missing(self, output: Sequence[int]) -> int:
        """Return how many tokens `follow` has to consume to come to an output."""
        is_continued = list(output[: len(self._followed)]) == self._followed
        return len(output) - len(self._followed) if is_continued else len(output)

    def forced(self) -> list[int]:
        """Return the tokens that must follow, whatever the model's logits are: it takes as long as they are long."""
        return self._matcher.compute_ff_tokens()

    def check(self) -> None:
        """Raise `ConstraintFailed` where the matcher has failed: it never recovers."""
        if self._matcher.is_error():
            raise ConstraintFailed(
                f"the constraint fails after {len(self._followed)} tokens: {one_line(self._matcher.get_error())}"
            )
