"""A matcher that follows one request's output."""

from collections.abc import Sequence

from llguidance import LLMatcher

from outrider.errors import ConstraintFailed
from outrider.grammar.source import one_line


class OutputMatcher:
    """Knows what may follow an output. Not thread-safe.

    Its state follows from the output alone: `follow` goes back and on along the tokens, as sessions do.

    Args:
        matcher: at the beginning of an output; owned by this object.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
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
        known = self._followed
        num_same = len(known) if list(output[: len(known)]) == known else _common_len(known, output)
        if num_same < len(known):
            self._matcher.rollback(len(known) - num_same)
            del known[num_same:]
        if rest := list(output[num_same:]):
            self._matcher.consume_tokens(rest)
            known += rest
        self.check()

    def forced(self, most: int) -> list[int]:
        """Return the tokens that must follow, whatever the model's logits are: up to `most` of them."""
        return self._matcher.compute_ff_tokens()[:most] if most > 0 else []

    def check(self) -> None:
        """Raise `ConstraintFailed` where the matcher has failed: it never recovers."""
        if self._matcher.is_error():
            raise ConstraintFailed(
                f"the constraint fails after {len(self._followed)} tokens: {one_line(self._matcher.get_error())}"
            )


def _common_len(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
