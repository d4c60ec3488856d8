"""Compiles constraints for one tokenizer, beside the threads that need them, and keeps what was compiled last."""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.constraint import FIELD, Constraint
from outrider.errors import InvalidArgument, OutriderError, Overloaded
from outrider.grammar.source import grammar_of, one_line

_LOG: Final = logging.getLogger(__name__)
_MAX_PENDING: Final = 64
_MAX_KEPT: Final = 32
_MAX_KEPT_BYTES: Final = 4 << 20
_LIMITS: Final = LLParserLimits(
    # Half of the default fuel: a step of 7 ms or so in the worst case, in an engine's thread.
    step_lexer_fuel=100_000,
    # About 2 kB each, for as long as a grammar is kept.
    max_lexer_states=20_000,
    verbose_errors=False,
)


class CompiledGrammar:
    """A grammar that is being compiled, or has been."""

    def __init__(self, future: "Future[LLMatcher]") -> None:
        self._future = future

    @property
    def is_ready(self) -> bool:
        """Whether compiling has ended."""
        return self._future.done()

    @property
    def error(self) -> OutriderError | None:
        """Why the constraint cannot be used; None where it can, or is not compiled yet."""
        error = self._future.exception() if self._future.done() else None
        if error is None or isinstance(error, OutriderError):
            return error
        return InvalidArgument(f"cannot be compiled: {error}", FIELD)

    def matcher(self) -> LLMatcher:
        """Return a new matcher at the beginning of an output; wait for it, and raise `OutriderError` as `error` is."""
        if self._future.exception() is not None and (error := self.error) is not None:
            raise error
        return self._future.result().deep_copy()

    def on_ready(self, fn: Callable[[], object]) -> None:
        """Have a function called, in any thread, once compiling has ended; at once where it has."""
        self._future.add_done_callback(lambda _: fn())


class GrammarCompiler:
    """Compiles constraints in a thread of its own. All methods may be called from any thread.

    Args:
        tokenizer: tokenizer.json.
        vocabulary_size: width of the masks; token ids beyond the tokenizer are never allowed.
        eos_token_ids: allowed where the output may end; empty for the tokenizer's own.
    """

    def __init__(self, tokenizer: str, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocabulary_size = vocabulary_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._num_pending = 0
        # Begun at once: a large vocabulary takes a second.
        self._tokenizer = self._thread.submit(load_tokenizer, tokenizer, vocabulary_size, eos_token_ids)

    def begin(self, constraint: Constraint) -> CompiledGrammar:
        """Begin to compile a constraint, or return it where it is kept.

        Raises:
            Overloaded: 64 wait already.
        """
        with self._lock:
            if (known := self._kept.get(constraint)) is not None:
                self._kept.move_to_end(constraint)
                return known
            if self._num_pending >= _MAX_PENDING:
                raise Overloaded(f"{self._num_pending} constraints wait to be compiled, the limit")
            self._num_pending += 1
            grammar = self._kept[constraint] = CompiledGrammar(self._thread.submit(self._compiled, constraint))
            self._drop_oldest()
        return grammar

    def close(self) -> None:
        """End the thread: what is running finishes, what waits does not begin."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        try:
            return compiled(constraint, self._tokenizer.result())
        finally:
            with self._lock:
                self._num_pending -= 1

    def _drop_oldest(self) -> None:
        while len(self._kept) > 1 and (
            len(self._kept) > _MAX_KEPT or sum(item.num_bytes for item in self._kept) > _MAX_KEPT_BYTES
        ):
            self._kept.popitem(last=False)


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
        raise InvalidArgument(f"the model's tokenizer cannot be used for constraints: {error}", FIELD) from error


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
