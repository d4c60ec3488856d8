"""Compiles constraints for one tokenizer, beside the threads that need them.

Every request compiles its own, also where another has the same constraint: copies of a matcher share the states of the
lexer, and with them their bound, so that what one request writes, or what is drafted for it, would decide about others.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from llguidance import LLMatcher
from tokenizers import Tokenizer

from outrider.constraint import FIELD, Constraint
from outrider.errors import ConstraintFailed, InvalidArgument, OutriderError, Overloaded
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.grammar.matcher import OutputMatcher
from outrider.tokens import ProposalTree

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.grammar.masks import NodeMasks

ResultT = TypeVar("ResultT")
_MAX_PENDING: Final = 256
_NICENESS: Final = 10


class _Ready(NamedTuple):
    """What a thread has prepared: the matcher, and masks that were computed apart from it."""

    matcher: OutputMatcher
    masks: "NodeMasks | None" = None


class CompiledGrammar:
    """The grammar of one request: it is being compiled, or follows a long output, or is ready.

    Args:
        threads: that do both.
        compile_grammar: returns a matcher at the beginning of an output.
        vocabulary_size: V, of its masks.
    """

    def __init__(self, threads: "_Threads", compile_grammar: Callable[[], LLMatcher], vocabulary_size: int) -> None:
        self._threads = threads
        self._compile = compile_grammar
        self._vocabulary_size = vocabulary_size
        self._is_dropped = False
        self._expected: list[int] = []
        self._future = threads.submit(lambda: _Ready(_after(self._begun(), self._expected)))

    @property
    def is_ready(self) -> bool:
        """Whether the matcher can be used."""
        return self._future.done()

    @property
    def matcher(self) -> OutputMatcher:
        """The matcher of the request's output, for one thread; waits for it.

        Raises:
            OutriderError: the constraint cannot be compiled.
        """
        return self._ready().matcher

    @property
    def masks(self) -> "NodeMasks | None":
        """The masks that `begin_anew` has been asked for; waits for them."""
        return self._ready().masks

    def on_ready(self, fn: Callable[[], object]) -> None:
        """Have a function called, in any thread, once the matcher can be used; at once where it can."""
        self._future.add_done_callback(lambda _: fn())

    def expect(self, output: Sequence[int]) -> None:
        """Have the matcher come to an output as soon as it is compiled, in the same turn, if that has not begun."""
        self._expected = list(output)

    def follow(self, output: Sequence[int]) -> None:
        """Have the matcher, which is ready, come to a long output beside the threads that need it."""
        matcher, tokens = self.matcher, list(output)
        self._future = self._threads.submit(lambda: _Ready(_after(matcher, tokens)))

    def begin_anew(self, output: Sequence[int], tree: ProposalTree, tokens: "Tensor | None") -> None:
        """Compile it once more, and come to an output.

        Args:
            output: so far.
            tree: proposal whose masks are wanted too, each path by a grammar of its own.
            tokens: see `node_masks`.
        """
        # Only targets ask for masks here; drafts from text run without torch.
        from outrider.grammar.masks import masks_apart

        so_far = list(output)

        def prepare() -> _Ready:
            masks = masks_apart(self._begun, so_far, tree, self._vocabulary_size, tokens) if tree else None
            return _Ready(_after(self._begun(), so_far), masks)

        self._future = self._threads.submit(prepare)

    def drop(self) -> None:
        """Compile it no more: its request has ended. What is being compiled is finished."""
        self._is_dropped = True
        self._future.cancel()

    def _begun(self) -> OutputMatcher:
        if self._is_dropped:
            raise CancelledError
        return OutputMatcher(self._compile().deep_copy)

    def _ready(self) -> _Ready:
        try:
            return self._future.result()
        except OutriderError:
            raise
        except (Exception, CancelledError) as error:
            raise InvalidArgument(f"cannot be compiled: {error}", FIELD) from error


def _after(matcher: OutputMatcher, output: Sequence[int]) -> OutputMatcher:
    """Return a matcher once it has come to an output; where it fails there, it fails for those who need it as well."""
    with contextlib.suppress(ConstraintFailed):
        matcher.follow(output)
    return matcher


class _Threads:
    """Threads that run behind those that serve, and the number of jobs that have not ended."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(num_at_once(), thread_name_prefix="grammar", initializer=_yield_to_others)
        self._lock = threading.Lock()
        self.num_pending = 0

    def submit(self, fn: Callable[[], ResultT]) -> "Future[ResultT]":
        """Run a function in one of the threads."""
        with self._lock:
            self.num_pending += 1
        future = self._pool.submit(fn)
        future.add_done_callback(self._end)
        return future

    def close(self) -> None:
        """End the threads: what is running finishes, what waits does not begin."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, future: "Future[Any]") -> None:
        with self._lock:
            self.num_pending -= 1


class GrammarCompiler:
    """Compiles constraints in threads of its own. All methods may be called from any thread.

    Args:
        tokenizer: tokenizer.json.
        vocabulary_size: width of the masks; token ids beyond the tokenizer are never allowed.
        eos_token_ids: allowed where the output may end; empty for the tokenizer's own.
    """

    def __init__(self, tokenizer: str, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocabulary_size = vocabulary_size
        self._threads = _Threads()
        # Begun at once: a large vocabulary takes a second.
        self._tokenizer = self._threads.submit(lambda: load_tokenizer(tokenizer, vocabulary_size, eos_token_ids))
        self._token_ids = self._threads.submit(lambda: token_ids_of(tokenizer))

    @property
    def token_ids(self) -> Collection[int]:
        """The ids that the tokenizer has."""
        return self._token_ids.result()

    def begin(self, constraint: Constraint) -> CompiledGrammar:
        """Begin to compile a constraint for a request.

        Raises:
            Overloaded: 256 wait already.
        """
        if (num := self._threads.num_pending) >= _MAX_PENDING:
            raise Overloaded(f"{num} constraints wait to be compiled, the limit")
        return CompiledGrammar(
            self._threads, lambda: compiled(constraint, self._tokenizer.result()), self.vocabulary_size
        )

    def close(self) -> None:
        """End the threads: what is running finishes, what waits does not begin."""
        self._threads.close()


def num_at_once() -> int:
    """Return how many constraints a service compiles at a time.

    Two, so that one that takes long does not hold up all others; one on two cores, which the services need themselves.
    """
    return 2 if len(os.sched_getaffinity(0)) > 2 else 1


def _yield_to_others() -> None:
    """Have this thread run behind those that serve, where cores are few."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def token_ids_of(definition: str) -> frozenset[int]:
    """Return the ids that a tokenizer has.

    Args:
        definition: tokenizer.json.
    """
    return frozenset(Tokenizer.from_str(definition).get_vocab(with_added_tokens=True).values())
