"""The stacks, modes and options of `bench.distance`."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from bench.kinds import KINDS
from bench.models import served_name, synthetic_pair
from bench.number_lists import numbers
from bench.proxy import Proxy
from bench.remote_draft import remote_draft
from bench.traffic import Prompts, Trace, follow
from bench.worker import Worker
from outrider.client import GenerationRequest, LocalStack, Message, OutriderClient, Speculation, StackOptions
from outrider.client.statistics import Statistics
from outrider.parameters import SamplingParameters

PLAIN: Final = "plain"
COLOCATED: Final = "colocated"
BOTH_CORES: Final = "colocated, both cores"
SYNCHRONOUS: Final = "synchronous"
STREAMING: Final = "streaming"
_TIMEOUT_S: Final = 900.0
LOCAL_MODES: Final = (PLAIN, COLOCATED, BOTH_CORES)
REMOTE_MODES: Final = (SYNCHRONOUS, STREAMING)
_WARM_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        rtts_ms: round-trip times between draft and target, in milliseconds, comma-separated.
        acceptances: acceptance rates that are measured at all round-trip times, comma-separated.
        ends: acceptance rates that are measured at the first and last round-trip time only; may be empty.
        num_repeats: measurements per case, of which the median is reported.
        num_rounds: minimum target passes per measurement.
        num_speculative_tokens: drafted tokens per round along one path.
        lookahead: nodes that a streaming draft may hold ahead of verdicts.
        model: base model of the target. Two models on one machine share its memory bandwidth, unlike models on two
            nodes; Markov models with simulated pass times share nothing:
            `markov:vocabulary=512;order=1;step_s=0.094;row_s=0.0053;padding=4`.
        draft: base model of the draft, with a vocabulary of the same size.
        prompt_len: tokens of the prompt.
        temperature: sampling temperature; 0 is greedy.
        drafter: drafter of a real pair, such as eagle3; empty for a synthetic pair. A real pair uses `model` and
            `draft` (which may be empty) directly, with chat prompts and its own acceptance rate; the colocated modes
            are left out if the drafter cannot be colocated.
    """

    rtts_ms: str = "0,1,5,10,20,50"
    acceptances: str = "0.8"
    ends: str = "0.6,0.9"
    num_repeats: int = 5
    num_rounds: int = 250
    num_speculative_tokens: int = 7
    lookahead: int = 64
    model: str = "shape:1b"
    draft: str = "shape:1b-draft"
    prompt_len: int = 64
    temperature: float = 0.0
    drafter: str = ""

    @property
    def alone(self) -> tuple[str, ...]:
        """Modes without a remote draft."""
        return LOCAL_MODES if self.drafter in ("", "model") else (PLAIN,)

    @property
    def grid(self) -> dict[float | None, tuple[float, ...]]:
        """Round-trip times, in milliseconds, by acceptance rate; None is the rate of a real pair."""
        rtts = numbers("rtts_ms", self.rtts_ms, float, 0.0)
        if self.drafter:
            return {None: rtts}
        ends = tuple(dict.fromkeys((rtts[0], rtts[-1])))
        found: dict[float | None, tuple[float, ...]] = {}
        for acceptance in numbers("acceptances", self.acceptances, float, 0.0):
            found[acceptance] = rtts
        for acceptance in numbers("ends", self.ends, float, 0.0) if self.ends else ():
            found[acceptance] = ends
        return found


@dataclass(slots=True)
class Case:
    """The measurements of one mode at one round-trip time.

    Attributes:
        rates: output tokens per second of each measurement.
        predictions: tokens per second that the target's controller predicted, for each measurement.
        statistics: statistics of all requests.
    """

    rates: list[float] = field(default_factory=list)
    predictions: list[float] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)


class Stacks:
    """The local stacks of one pair of models, pinned to cores, and the proxy between draft and target.

    Args:
        options: options of the benchmark.
        acceptance: acceptance rate of a synthetic pair; None for a real one.
        cores: core of the target and core of the draft.
    """

    def __init__(self, options: Options, acceptance: float | None, cores: list[int]) -> None:
        self._options = options
        if acceptance is None:
            self._target, self._draft = served_name(options.model), options.draft and served_name(options.draft)
        else:
            self._target, self._draft = synthetic_pair(options.model, options.draft, acceptance)
        self._texts: Iterator[str] = iter(())
        self._cores = cores
        self._open = AsyncExitStack()
        self._clients: dict[str, OutriderClient] = {}
        self._seed = 0

    async def __aenter__(self) -> "Stacks":
        try:
            await self._start()
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *about: object) -> None:
        await self._open.aclose()

    async def _start(self) -> None:
        draft = await self._open.enter_async_context(remote_draft(self._draft, self._options.drafter or "model"))
        self._proxy = Proxy(draft.address)
        self._open.push_async_callback(self._proxy.close)
        address = await self._proxy.start()
        own = {"OUTRIDER_COLOCATED_DRAFTER": "model", "OUTRIDER_COLOCATED_MODEL": self._draft}
        one, both = frozenset(self._cores[:1]), frozenset(self._cores)
        stacks = {PLAIN: await self._stack({}, one, {"OUTRIDER_DRAFTS": address})}
        if COLOCATED in self._options.alone:
            stacks[COLOCATED] = await self._stack(own, one, {})
            stacks[BOTH_CORES] = await self._stack(own, both, {})
        for mode, stack in stacks.items():
            self._clients[mode] = await self._open.enter_async_context(stack.client())
        self._clients |= dict.fromkeys(REMOTE_MODES, self._clients[PLAIN])
        async with Worker(stacks[PLAIN].targets[0]) as worker:
            self._vocabulary_size = (await worker.info()).vocabulary_size
        self._prompts = Prompts(self._vocabulary_size)
        self._texts = itertools.cycle(KINDS["chat"])
        for mode in (*self._options.alone, *REMOTE_MODES):
            await self._generate(mode, _WARM_TOKENS)

    async def _stack(
        self, settings: Mapping[str, str], cores: frozenset[int], orchestrator: Mapping[str, str]
    ) -> LocalStack:
        options = StackOptions(
            model=self._target,
            drafts=(),
            target_threads=len(cores),
            target_cores=cores,
            target_environment=settings,
            orchestrator_environment={
                "OUTRIDER_NUM_SPECULATIVE_TOKENS": str(self._options.num_speculative_tokens),
                "OUTRIDER_DRAFT_MAX_WAIT_S": "1",
                **orchestrator,
            },
        )
        return await self._open.enter_async_context(LocalStack(options))

    async def measure(self, mode: str, rtt_ms: float | None, case: Case) -> None:
        """Add a measurement of at least `num_rounds` rounds to a case."""
        # All modes have the same prompts, so that their acceptance is comparable.
        self._prompts = Prompts(self._vocabulary_size, 1 + len(case.rates))
        self._texts = itertools.cycle(text for texts in zip(*KINDS.values(), strict=True) for text in texts)
        self._proxy.up.latency_s = self._proxy.down.latency_s = (rtt_ms or 0.0) / 2000
        await self._generate(mode, _WARM_TOKENS)
        num_rounds, seconds, num_tokens = 0, 0.0, 0
        num_expected, expected_s = 0, 0.0
        while num_rounds < self._options.num_rounds:
            trace = await self._generate(mode, self._options.num_rounds)
            num_rounds += trace.statistics.num_target_passes
            # The time runs from the first delta to the last, so that the first token does not count.
            later = trace.num_tokens - 1
            if later < 1:
                continue
            num_tokens += later
            seconds += later / trace.statistics.tokens_per_second
            num_expected += trace.statistics.num_expected_tokens
            expected_s += trace.statistics.expected_time_s
            case.statistics.append(trace.statistics)
        case.rates.append(num_tokens / seconds)
        case.predictions.append(num_expected / expected_s)

    async def _generate(self, mode: str, num_tokens: int) -> Trace:
        options = self._options
        speculation = Speculation(disabled=mode == PLAIN, lookahead=0)
        if mode == STREAMING:
            speculation = replace(speculation, lookahead=options.lookahead)
        self._seed += 1
        is_real = bool(options.drafter)
        parameters = SamplingParameters(
            temperature=options.temperature, max_tokens=num_tokens, ignore_eos=not is_real, seed=self._seed
        )
        request = GenerationRequest(
            token_ids=None if is_real else tuple(self._prompts.draw(options.prompt_len)),
            messages=(Message("user", next(self._texts)),) if is_real else None,
            parameters=parameters,
            speculation=speculation,
        )
        return await follow(self._clients[mode], request, Trace(), _TIMEOUT_S)
