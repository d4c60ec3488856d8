"""Decision sources for proofs: one enumerates every outcome, one detects counters that decide twice."""

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from torch import Tensor

from outrider.speculation.randomness import Counter, KeyedSource

ResultT = TypeVar("ResultT", bound=Hashable)


class ForkingSource:
    """Decides by a script, and after its end for the first possible outcome; `weight` is the probability of the run."""

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self._num_decisions = 0
        self.weight = 1.0
        self.num_options: list[int] = []

    def pick(self, weights: Tensor, counter: Counter) -> int:
        values = weights.tolist()
        total = sum(values)
        options = [(token_id, value / total) for token_id, value in enumerate(values) if value > 0]
        return self._decide(options)

    def accept(self, probability: float, counter: Counter) -> bool:
        if not 0 <= probability <= 1:
            raise ValueError(f"probability is {probability}")
        return bool(self._decide([(value, p) for value, p in ((1, probability), (0, 1 - probability)) if p > 0]))

    def _decide(self, options: list[tuple[int, float]]) -> int:
        index = self._script[self._num_decisions] if self._num_decisions < len(self._script) else 0
        self._num_decisions += 1
        self.num_options.append(len(options))
        outcome, probability = options[index]
        self.weight *= probability
        return outcome


def every_run(run: Callable[[ForkingSource], ResultT]) -> Iterator[tuple[ResultT, float]]:
    """Yield the result of every possible run, with its probability; `run` must depend on its source alone."""
    script: list[int] = []
    while True:
        source = ForkingSource(script)
        result = run(source)
        yield result, source.weight
        script = _next_script(script, source.num_options)
        if not script:
            return


def _next_script(script: list[int], num_options: list[int]) -> list[int]:
    """Return the script of the next run in order, empty after the last."""
    script = script + [0] * (len(num_options) - len(script))
    while script and script[-1] + 1 == num_options[len(script) - 1]:
        script.pop()
    return [*script[:-1], script[-1] + 1] if script else []


class CounterReusedError(AssertionError):
    """A counter decided twice."""


class RecordingSource:
    """Decides as a keyed source does, and raises `CounterReusedError` if a counter decides a second time."""

    def __init__(self, seed: int) -> None:
        self._source = KeyedSource(seed)
        self.counters: set[tuple[int, int, int]] = set()

    def pick(self, weights: Tensor, counter: Counter) -> int:
        self._record(counter)
        return self._source.pick(weights, counter)

    def accept(self, probability: float, counter: Counter) -> bool:
        self._record(counter)
        return self._source.accept(probability, counter)

    def _record(self, counter: Counter) -> None:
        # The words are the generator's input: two counters with the same words would share their noise.
        if counter.words in self.counters:
            raise CounterReusedError(f"{counter} decided before")
        self.counters.add(counter.words)
