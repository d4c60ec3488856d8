"""The cost of a shared prefix: many sessions with one system prompt, compared with a single session."""

from dataclasses import dataclass
from typing import Final

from bench.background import background_sessions
from bench.traffic import Prompts, RequestTemplate, Trace
from bench.worker import Worker
from outrider.client import LocalStack, StackOptions

# More than are generated in time, because the KV cache is measured while all sessions generate.
_NUM_TOKENS: Final = 2000
_WARM_UP_TOKENS: Final = 100


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Options of the measurement.

    Attributes:
        model: model name, as the target loads it.
        num_sessions: sessions that share the prefix, at least 2.
        prefix_len: tokens of the shared prefix.
        tail_len: tokens after the prefix, different in each session.
    """

    model: str
    num_sessions: int = 32
    prefix_len: int = 1000
    tail_len: int = 4


async def measure_prefix(options: PrefixOptions) -> dict[str, float]:
    """Run one session with a prefix, then, while it generates, all other sessions with the prefix concurrently.

    Returns:
        The KV cache of all sessions divided by that of the first; the seconds to first token of the first session plus
        those until all others have theirs, divided by those of the first; and both values of the first session.
    """
    async with (
        LocalStack(StackOptions(model=options.model, drafts=())) as stack,
        stack.client() as client,
        Worker(stack.targets[0]) as worker,
    ):
        prompts = Prompts((await worker.info()).vocabulary_size)
        template = RequestTemplate(_NUM_TOKENS)
        # A warm-up with another prefix of the same length.
        async with background_sessions(
            client, [prompts.draw(options.prefix_len)] * 2, template, num_deltas=_WARM_UP_TOKENS
        ):
            pass
        prefix = prompts.draw(options.prefix_len)
        sessions = [prefix + prompts.draw(options.tail_len) for _ in range(options.num_sessions)]
        async with background_sessions(client, sessions[:1], template) as first:
            one_bytes = (await worker.load()).kv_used_bytes
            async with background_sessions(client, sessions[1:], template) as others:
                all_bytes = (await worker.load()).kv_used_bytes
    one_s = _prefill_s(first)
    return {
        "prefix_kv_bytes_over_one": all_bytes / one_bytes,
        "prefix_prefill_over_one": (one_s + _prefill_s(others)) / one_s,
        "prefix_kv_bytes_of_one": float(one_bytes),
        "prefix_prefill_of_one_s": one_s,
    }


def _prefill_s(traces: list[Trace]) -> float:
    """Return the seconds until all sessions have their first token."""
    return max(trace.times_s[0] for trace in traces) - traces[0].started_s
