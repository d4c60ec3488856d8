"""How long sessions that decode are held up by another one's long prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.held import hold
from bench.result import quantile
from bench.traffic import Ask, Prompts, Trace, run_wave
from outrider.client import OutriderClient

_QUIET_DELTAS: Final = 40
# The first deltas of a session come while the others are still being prefilled.
_SETTLING_DELTAS: Final = 5
_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class StallOptions:
    """What is measured.

    Attributes:
        num_sessions: sessions that decode meanwhile, without speculation.
        prompt_len: tokens of each one's own prompt.
        prefill_len: tokens of the long prompt.
        num_prefills: long prompts, one after another.
        max_tokens: output tokens of the sessions, at most; they are cancelled when all is measured.
        timeout_s: bound on each wait.
    """

    num_sessions: int = 4
    prompt_len: int = 64
    prefill_len: int = 2000
    num_prefills: int = 3
    max_tokens: int = 4000
    timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds between the deltas of a session.

    Attributes:
        quiet: gaps while nothing else ran.
        under_prefill: gaps that overlap with the time from asking for the long prompt to its first token.
        prefill_s: how long each long prompt took.
    """

    quiet: Sequence[float]
    under_prefill: Sequence[float]
    prefill_s: Sequence[float]

    @property
    def ratio(self) -> float:
        """The 99th percentile under prefill over the median without; 0 where the sessions ended too early to tell."""
        if not self.quiet or not self.under_prefill:
            return 0.0
        return quantile(self.under_prefill, 0.99) / quantile(self.quiet, 0.5)


async def measure_stall(client: OutriderClient, prompts: Prompts, options: StallOptions) -> Stall:
    """Decodes some sessions, sends long prompts meanwhile, and compares the gaps between deltas."""
    ask = Ask(options.max_tokens, timeout_s=options.timeout_s)
    asked = [prompts.draw(options.prompt_len) for _ in range(options.num_sessions)]
    async with hold(client, asked, ask, num_deltas=_QUIET_DELTAS) as traces:
        spans = []
        for _ in range(options.num_prefills):
            (trace,) = await run_wave(client, [prompts.draw(options.prefill_len)], Ask(1, timeout_s=options.timeout_s))
            spans.append((trace.started_s, trace.times_s[0]))
            await asyncio.sleep(_PAUSE_S)
        return gaps_of(traces, spans)


def gaps_of(traces: Sequence[Trace], spans: Sequence[tuple[float, float]]) -> Stall:
    """Tells the gaps between deltas while nothing else ran from those that overlap with a prefill.

    Args:
        traces: of the sessions that decode.
        spans: when each prefill began and ended.
    """
    # In a session's first gaps the other sessions' prompts are still being run.
    settled = max((trace.times_s[0] for trace in traces if trace.times_s), default=0.0)
    gaps = [gap for trace in traces for gap in trace.gaps[_SETTLING_DELTAS:] if gap[0] >= settled]

    def overlaps(gap: tuple[float, float]) -> bool:
        return any(gap[0] < end and gap[1] > start for start, end in spans)

    return Stall(
        quiet=[end - start for start, end in gaps if not overlaps((start, end))],
        under_prefill=[end - start for start, end in gaps if overlaps((start, end))],
        prefill_s=[end - start for start, end in spans],
    )
