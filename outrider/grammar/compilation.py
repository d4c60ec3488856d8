"""Constraints compiled by llguidance, at the beginning of an output; no model library is needed for that."""

import json
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.constraint import FIELD, Constraint
from outrider.errors import InvalidArgument
from outrider.grammar.source import grammar_of, one_line

_LIMITS: Final = LLParserLimits(
    # Half of the default fuel: a step of 7 ms or so in the worst case, in an engine's thread.
    step_lexer_fuel=100_000,
    # 1 to 2 kB each. A text of bounded length has a state for each character that it may have.
    max_lexer_states=50_000,
    verbose_errors=False,
)


def load_tokenizer(definition: str, vocabulary_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return llguidance's form of a tokenizer.

    Args:
        definition: tokenizer.json.
        vocabulary_size: of the model.
        eos_token_ids: of the model; empty for the tokenizer's own.

    Raises:
        InvalidArgument: llguidance cannot use it, so that its model takes no constraints.
    """
    content = json.loads(definition)
    # Meant for training: they would cut and lengthen the texts that are forced.
    content |= {"truncation": None, "padding": None}
    try:
        return LLTokenizer(
            json.dumps(content), n_vocab=vocabulary_size, eos_token=list(eos_token_ids) if eos_token_ids else None
        )
    except ValueError as error:
        problem = f"the model's tokenizer cannot be used for constraints: {one_line(str(error))}"
        raise InvalidArgument(problem, FIELD) from error


def compiled(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of an output, whose first mask is known: it takes longest.

    Raises:
        InvalidArgument: the constraint is wrong, or exceeds a bound; with llguidance's message and position.
    """
    try:
        matcher = LLMatcher(tokenizer, grammar_of(constraint, tokenizer), log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise InvalidArgument(f"{constraint.kind}: {one_line(str(error))}", FIELD) from error
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and not any(mask):
            raise InvalidArgument(f"{constraint.kind} allows no output", FIELD)
    if matcher.is_error():
        raise InvalidArgument(f"{constraint.kind}: {one_line(matcher.get_error())}", FIELD)
    return matcher
