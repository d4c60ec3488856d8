"""Sessions of a served stack as a bench sees them: when each delta came, and what speculation did."""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from outrider.client import Delta, Finished, GenerationRequest, OutriderClient, Speculation
from outrider.client.events import Statistics
from outrider.parameters import SamplingParameters


@dataclass(slots=True)
class Trace:
    """One session's generation.

    Attributes:
        started_s: when it was asked for, on the clock of `time.perf_counter`.
        times_s: when each delta came, on that clock.
        num_tokens: output tokens so far.
        statistics: what speculation did; empty until the end.
    """

    started_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def first_token_s(self) -> float:
        """Seconds from asking to the first delta."""
        return self.times_s[0] - self.started_s

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each gap between two deltas began and ended."""
        return list(itertools.pairwise(self.times_s))


@dataclass(frozen=True, slots=True)
class Ask:
    """What every session of a wave asks for.

    Attributes:
        num_tokens: output tokens, exactly.
        speculates: whether a draft is used.
        temperature: 0 is greedy.
        timeout_s: bound on each generation.
    """

    num_tokens: int
    speculates: bool = False
    temperature: float = 0.0
    timeout_s: float = 300.0

    def request(self, token_ids: Sequence[int], session_id: str = "") -> GenerationRequest:
        """Returns the request of one session."""
        parameters = SamplingParameters(
            temperature=self.temperature, max_tokens=self.num_tokens, ignore_eos=True, seed=0
        )
        speculation = Speculation(disabled=not self.speculates)
        return GenerationRequest(
            token_ids=tuple(token_ids), parameters=parameters, speculation=speculation, session_id=session_id
        )


async def follow(client: OutriderClient, request: GenerationRequest, trace: Trace, timeout_s: float) -> Trace:
    """Runs a generation, writes down in `trace` what comes, and returns it at the end."""
    async with aclosing(client.generate(request, timeout_s=timeout_s)) as events:
        async for event in events:
            match event:
                case Delta():
                    trace.times_s.append(time.perf_counter())
                    trace.num_tokens += len(event.token_ids)
                case Finished():
                    trace.statistics = event.statistics
    return trace


async def run_wave(client: OutriderClient, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Trace]:
    """Runs one session for each prompt, all at once; returns their traces when all have ended."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(client, ask.request(prompt), Trace(), ask.timeout_s)) for prompt in prompts]
    return [task.result() for task in tasks]


class Prompts:
    """Random prompts, no two with a common beginning, so that no prefix of one is cached for another.

    Args:
        vocabulary_size: V; the lowest ids, which tend to be special tokens, are left out.
        seed: of the generator.
    """

    def __init__(self, vocabulary_size: int, seed: int = 0) -> None:
        self._ids = range(min(100, vocabulary_size // 2), vocabulary_size)
        self._random = random.Random(seed)

    def draw(self, length: int) -> tuple[int, ...]:
        """Returns a new prompt of so many tokens."""
        return tuple(self._random.choices(self._ids, k=length))
