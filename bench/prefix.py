"""What a common prefix costs: many sessions that begin with one system prompt, against one session alone."""

from dataclasses import dataclass
from typing import Final

from bench.held import hold
from bench.traffic import Ask, Prompts, Trace
from bench.worker import Worker
from outrider.client import LocalStack, StackOptions

# Longer than the whole takes: KV cache is counted while all sessions generate.
_NUM_TOKENS: Final = 2000
_WARM_UP_TOKENS: Final = 100


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """What is measured.

    Attributes:
        model: as the target loads it.
        num_sessions: sessions with the prefix, at least 2.
        prefix_len: tokens that all have in common.
        tail_len: tokens that follow, different in each session.
    """

    model: str
    num_sessions: int = 32
    prefix_len: int = 1000
    tail_len: int = 4


async def measure_prefix(options: PrefixOptions) -> dict[str, float]:
    """Runs one session with a prefix, then, while that one goes on, all the others with it at once.

    Returns:
        KV cache that all sessions hold together over that of the first; the seconds until each had its first token
        (the first session's, then those of the others) over the first session's; and both values of one session.
    """
    async with (
        LocalStack(StackOptions(model=options.model, drafts=())) as stack,
        stack.client() as client,
        Worker(stack.targets[0]) as worker,
    ):
        prompts = Prompts((await worker.info()).vocabulary_size)
        ask = Ask(_NUM_TOKENS)
        # Another prefix, as long as what follows, so that nothing is done for the first time there.
        async with hold(client, [prompts.draw(options.prefix_len)] * 2, ask, num_deltas=_WARM_UP_TOKENS):
            pass
        prefix = prompts.draw(options.prefix_len)
        asked = [prefix + prompts.draw(options.tail_len) for _ in range(options.num_sessions)]
        async with hold(client, asked[:1], ask) as first:
            one_bytes = (await worker.load()).kv_used_bytes
            async with hold(client, asked[1:], ask) as others:
                all_bytes = (await worker.load()).kv_used_bytes
    one_s = _prefill_s(first)
    return {
        "prefix_kv_bytes_over_one": all_bytes / one_bytes,
        "prefix_prefill_over_one": (one_s + _prefill_s(others)) / one_s,
        "prefix_kv_bytes_of_one": float(one_bytes),
        "prefix_prefill_of_one_s": one_s,
    }


def _prefill_s(traces: list[Trace]) -> float:
    """Returns the seconds until each session had its first token."""
    return max(trace.times_s[0] for trace in traces) - traces[0].started_s
