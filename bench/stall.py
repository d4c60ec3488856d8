"""The inter-token latency of decoding sessions during the prefill of a long prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.background import background_sessions
from bench.result import quantile
from bench.traffic import Prompts, RequestTemplate, Trace, run_wave
from outrider.client import OutriderClient

_QUIET_DELTAS: Final = 40
# The first deltas of a session arrive while the other sessions are still in prefill.
_SETTLING_DELTAS: Final = 5
_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class StallOptions:
    """Options of the measurement.

    Attributes:
        num_sessions: number of decoding sessions, without speculation.
        prompt_len: prompt tokens of each decoding session.
        prefill_len: tokens of the long prompt.
        num_prefills: number of sequential long prompts.
        max_tokens: maximum output tokens of the decoding sessions, which are cancelled at the end.
        timeout_s: timeout of each wait, in seconds.
    """

    num_sessions: int = 4
    prompt_len: int = 64
    prefill_len: int = 2000
    num_prefills: int = 3
    max_tokens: int = 4000
    timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Stall:
    """The gaps between the deltas of sessions, in seconds.

    Attributes:
        quiet: gaps without a concurrent prefill.
        under_prefill: gaps that overlap with a prefill, from its request to its first token.
        prefill_s: time to first token of each long prompt.
    """

    quiet: Sequence[float]
    under_prefill: Sequence[float]
    prefill_s: Sequence[float]

    @property
    def ratio(self) -> float:
        """The 99th percentile during prefill divided by the median without; 0 if there are no such gaps."""
        if not self.quiet or not self.under_prefill:
            return 0.0
        return quantile(self.under_prefill, 0.99) / quantile(self.quiet, 0.5)


async def measure_stall(client: OutriderClient, prompts: Prompts, options: StallOptions) -> Stall:
    """Decode some sessions, send long prompts concurrently, and compare the gaps between deltas."""
    template = RequestTemplate(options.max_tokens, timeout_s=options.timeout_s)
    drawn = [prompts.draw(options.prompt_len) for _ in range(options.num_sessions)]
    async with background_sessions(client, drawn, template, num_deltas=_QUIET_DELTAS) as traces:
        spans = []
        for _ in range(options.num_prefills):
            (trace,) = await run_wave(
                client, [prompts.draw(options.prefill_len)], RequestTemplate(1, timeout_s=options.timeout_s)
            )
            spans.append((trace.started_s, trace.times_s[0]))
            await asyncio.sleep(_PAUSE_S)
        return gaps_of(traces, spans)


def gaps_of(traces: Sequence[Trace], spans: Sequence[tuple[float, float]]) -> Stall:
    """Divide the gaps between deltas into those that overlap with a prefill and the others.

    Args:
        traces: traces of the decoding sessions.
        spans: start and end of each prefill.
    """
    # During a session's first gaps other sessions are still in prefill.
    settled = max((trace.times_s[0] for trace in traces if trace.times_s), default=0.0)
    gaps = [gap for trace in traces for gap in trace.gaps[_SETTLING_DELTAS:] if gap[0] >= settled]

    def overlaps(gap: tuple[float, float]) -> bool:
        return any(gap[0] < end and gap[1] > start for start, end in spans)

    return Stall(
        quiet=[end - start for start, end in gaps if not overlaps((start, end))],
        under_prefill=[end - start for start, end in gaps if overlaps((start, end))],
        prefill_s=[end - start for start, end in spans],
    )
