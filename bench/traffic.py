"""Sessions on a served stack: requests, arrival times of deltas, and speculation statistics."""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from bench.kinds import KINDS
from outrider.client import Delta, Finished, GenerationRequest, OutriderClient, Speculation
from outrider.client.statistics import Statistics
from outrider.parameters import SamplingParameters


@dataclass(slots=True)
class Trace:
    """The trace of one session's generation.

    Attributes:
        started_s: time of the request, on the clock of `time.perf_counter`.
        times_s: arrival time of each delta, on the same clock.
        num_tokens: output tokens so far.
        statistics: statistics of the request; empty until its end.
    """

    started_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first delta."""
        return self.times_s[0] - self.started_s

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Start and end of each gap between two deltas."""
        return list(itertools.pairwise(self.times_s))


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The parameters of the requests of a wave.

    Attributes:
        num_tokens: exact number of output tokens.
        speculates: whether speculation is enabled.
        temperature: sampling temperature; 0 is greedy.
        timeout_s: timeout of each generation, in seconds.
    """

    num_tokens: int
    speculates: bool = False
    temperature: float = 0.0
    timeout_s: float = 300.0

    def request(self, token_ids: Sequence[int], session_id: str = "") -> GenerationRequest:
        """Return a request with this prompt."""
        parameters = SamplingParameters(
            temperature=self.temperature, max_tokens=self.num_tokens, ignore_eos=True, seed=0
        )
        speculation = Speculation(disabled=not self.speculates)
        return GenerationRequest(
            token_ids=tuple(token_ids), parameters=parameters, speculation=speculation, session_id=session_id
        )


async def follow(client: OutriderClient, request: GenerationRequest, trace: Trace, timeout_s: float) -> Trace:
    """Run a generation, record it in `trace`, and return the trace at the end."""
    async with aclosing(client.generate(request, timeout_s=timeout_s)) as events:
        async for event in events:
            match event:
                case Delta():
                    trace.times_s.append(time.perf_counter())
                    trace.num_tokens += len(event.token_ids)
                case Finished():
                    trace.statistics = event.statistics
    return trace


async def run_wave(
    client: OutriderClient, prompts: Sequence[Sequence[int]], template: RequestTemplate, apart_s: float = 0.0
) -> list[Trace]:
    """Run one session per prompt concurrently; return their traces when all have ended.

    Args:
        client: sends the requests.
        prompts: token IDs of each.
        template: their parameters.
        apart_s: seconds from each request to the next; 0 to send all at once.
    """

    async def run(index: int, prompt: Sequence[int]) -> Trace:
        await asyncio.sleep(index * apart_s)
        return await follow(client, template.request(prompt), Trace(), template.timeout_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index, prompt)) for index, prompt in enumerate(prompts)]
    return [task.result() for task in tasks]


class Prompts:
    """Random prompts without common prefixes, so that there are no prefix-cache hits between them.

    Args:
        vocabulary_size: V; up to 100 of the lowest ids, which are often special tokens, are not used.
        seed: seed of the generator.
    """

    def __init__(self, vocabulary_size: int, seed: int = 0) -> None:
        self._ids = range(min(100, vocabulary_size // 2), vocabulary_size)
        self._random = random.Random(seed)

    def draw(self, length: int) -> tuple[int, ...]:
        """Return a new prompt of `length` tokens."""
        return tuple(self._random.choices(self._ids, k=length))


class Questions:
    """Questions to a chat model, in turn, each in a conversation of its own, without prefix-cache hits between them.

    Args:
        model: name by which transformers loads the tokenizer.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        # One of each kind in turn.
        texts = itertools.chain.from_iterable(zip(*KINDS.values(), strict=True))
        self._numbered = enumerate(itertools.cycle(texts), 1)

    def draw(self) -> tuple[int, ...]:
        """Return the next question, as the tokens of a new conversation."""
        number, text = next(self._numbered)
        messages = [
            {"role": "system", "content": f"{number} is the number of this conversation."},
            {"role": "user", "content": text},
        ]
        return tuple(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
