"""Compiles constraints for one tokenizer, beside the threads that need them.

Every request compiles its own, also where another has the same constraint: copies of a matcher share the states of the
lexer, and with them their bound, so that what one request writes, or what is drafted for it, would decide about others.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.constraint import FIELD, Constraint
from outrider.errors import InvalidArgument, OutriderError, Overloaded
from outrider.grammar.matcher import OutputMatcher
from outrider.grammar.source import grammar_of, one_line

_MAX_PENDING: Final = 256
_NICENESS: Final = 10
_LIMITS: Final = LLParserLimits(
    # Half of the default fuel: a step of 7 ms or so in the worst case, in an engine's thread.
    step_lexer_fuel=100_000,
    # 1 to 2 kB each. A text of bounded length has a state for each character that it may have.
    max_lexer_states=50_000,
    verbose_errors=False,
)


class CompiledGrammar:
    """The grammar of one request, which is being compiled, or has been."""

    def __init__(self, future: "Future[LLMatcher]") -> None:
        self._future = future
        self._matcher: OutputMatcher | None = None

    @property
    def is_ready(self) -> bool:
        """Whether compiling has ended."""
        return self._future.done()

    @property
    def has_begun(self) -> bool:
        """Whether compiling has begun; else others come first."""
        return self._future.running() or self._future.done()

    @property
    def matcher(self) -> OutputMatcher:
        """The matcher of the request's output, for one thread; waits for the grammar.

        Raises:
            OutriderError: the constraint cannot be compiled.
        """
        if self._matcher is None:
            try:
                begin = self._future.result().deep_copy
            except OutriderError:
                raise
            except (Exception, CancelledError) as error:
                raise InvalidArgument(f"cannot be compiled: {error}", FIELD) from error
            self._matcher = OutputMatcher(begin)
        return self._matcher

    def on_ready(self, fn: Callable[[], object]) -> None:
        """Have a function called, in any thread, once compiling has ended; at once where it has."""
        self._future.add_done_callback(lambda _: fn())

    def drop(self) -> None:
        """Compile it no more, where that has not begun: its request has ended."""
        self._future.cancel()


class GrammarCompiler:
    """Compiles constraints in threads of its own. All methods may be called from any thread.

    Args:
        tokenizer: tokenizer.json.
        vocabulary_size: width of the masks; token ids beyond the tokenizer are never allowed.
        eos_token_ids: allowed where the output may end; empty for the tokenizer's own.
    """

    def __init__(self, tokenizer: str, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocabulary_size = vocabulary_size
        self._threads = ThreadPoolExecutor(num_at_once(), thread_name_prefix="grammar", initializer=_yield_to_others)
        self._lock = threading.Lock()
        self._num_pending = 0
        # Begun at once: a large vocabulary takes a second.
        self._tokenizer = self._threads.submit(load_tokenizer, tokenizer, vocabulary_size, eos_token_ids)

    def begin(self, constraint: Constraint) -> CompiledGrammar:
        """Begin to compile a constraint for a request.

        Raises:
            Overloaded: 256 wait already.
        """
        with self._lock:
            if self._num_pending >= _MAX_PENDING:
                raise Overloaded(f"{self._num_pending} constraints wait to be compiled, the limit")
            self._num_pending += 1
        future = self._threads.submit(lambda: compiled(constraint, self._tokenizer.result()))
        future.add_done_callback(self._end)
        return CompiledGrammar(future)

    def close(self) -> None:
        """End the threads: what is running finishes, what waits does not begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, future: "Future[LLMatcher]") -> None:
        with self._lock:
            self._num_pending -= 1


def num_at_once() -> int:
    """Return how many constraints a service compiles at a time.

    Two, so that one that takes long does not hold up all others; one on two cores, which the services need themselves.
    """
    return 2 if len(os.sched_getaffinity(0)) > 2 else 1


def _yield_to_others() -> None:
    """Have this thread run behind those that serve, where cores are few."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


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
