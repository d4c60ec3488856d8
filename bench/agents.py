"""The gain of lookups where much is said again: tool loops, code edits and quotations, with ngram and with suffix.

The target runs the passes of a real model, and its output is forced to traces that a script makes (`bench.traces`), so
that acceptance is that of the traces, and not of what a small model would repeat. A kind's sessions run one after
another, and each of them in every mode, so that noise of the machine affects all equally. `suffix` learns from the
sessions before; each round has traces with words of their own, of which it knows nothing yet.
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

from bench.models import served_name, transformers_name
from bench.progress import progress
from bench.result import BenchResult, machine, median
from bench.traces import KINDS, traces
from outrider.client import (
    DraftOptions,
    Generation,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.lm.embedded import NAME as EMBEDDED
from outrider.lm.synthetic import SyntheticOptions
from outrider.parameters import SamplingParameters

PLAIN: Final = "plain"
NGRAM: Final = "ngram"
SUFFIX: Final = "suffix"
_MODES: Final = {
    PLAIN: Speculation(disabled=True),
    NGRAM: Speculation(drafter=NGRAM),
    SUFFIX: Speculation(drafter=SUFFIX),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_rounds: rounds, of which the median is reported.
        num_sessions: sessions of each kind in a round.
        num_speculative_tokens: longest main line that a pass verifies.
        model: whose passes the target runs, and whose tokenizer cuts the traces.
    """

    num_rounds: int = 3
    num_sessions: int = 5
    num_speculative_tokens: int = 16
    model: str = EMBEDDED


@dataclass(frozen=True, slots=True)
class _Session:
    """The token ids of a trace."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(slots=True)
class _Sum:
    """What the sessions of a kind took in one round."""

    num_tokens: int = 0
    num_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    seconds: float = 0.0


async def measure(options: Options) -> BenchResult:
    """Run every session in all modes, kind after kind, round after round.

    Raises:
        RuntimeError: a text is not the trace's.
    """
    tokenizer = AutoTokenizer.from_pretrained(transformers_name(options.model))

    def token_ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    rounds = [
        {
            kind: [
                _Session(token_ids(trace.prompt), token_ids(trace.output))
                for trace in traces(kind, options.num_sessions, seed=number)
            ]
            for kind in KINDS
        }
        for number in range(options.num_rounds)
    ]
    sums: dict[tuple[str, str], list[_Sum]] = {}
    async with AsyncExitStack() as open_until_done:
        folder = Path(open_until_done.enter_context(tempfile.TemporaryDirectory(prefix="outrider-agents-")))
        texts = folder / "texts.json"
        sessions = [session for kinds in rounds for several in kinds.values() for session in several]
        texts.write_text(json.dumps([[*session.prompt, *session.output] for session in sessions]))
        step = open_until_done.enter_context(progress(len(sessions) * len(_MODES)))
        stack = await open_until_done.enter_async_context(LocalStack(_stack_options(options, texts)))
        client = await open_until_done.enter_async_context(stack.client())
        await _warm_up(client, sessions[0])
        for number, kinds in enumerate(rounds):
            for kind, several in kinds.items():
                for mode in _MODES:
                    sums.setdefault((kind, mode), []).append(_Sum())
                for session in several:
                    for mode in _MODES:
                        step(f"round {number + 1}, {kind}, {mode}")
                        await _run(client, session, mode, sums[kind, mode][-1])
    rows = [_row(kind, mode, sums[kind, mode], sums[kind, PLAIN]) for kind, mode in sums]
    return BenchResult("agents", {**machine(), **asdict(options)}, rows, _figures(sums))


def _stack_options(options: Options, texts: Path) -> StackOptions:
    model = SyntheticOptions(base=served_name(options.model), texts=str(texts)).name
    # The sessions are of one user, whom nothing but the tenant would tell from others.
    drafts = (DraftOptions(NGRAM), DraftOptions(SUFFIX, environment={"OUTRIDER_SUFFIX_SCOPE": "all"}))
    environment = {"OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens)}
    return StackOptions(model=model, drafts=drafts, orchestrator_environment=environment)


async def _warm_up(client: OutriderClient, session: _Session) -> None:
    """Run a part of a session in all modes, and delete it, so that nothing is learnt from it."""
    short = replace(session, output=session.output[:64])
    for mode in _MODES:
        generation = await _run(client, short, mode, _Sum())
        await client.delete_session(generation.session_id)


async def _run(client: OutriderClient, session: _Session, mode: str, total: _Sum) -> Generation:
    """Run a session in one mode, and add what it took; return its end."""
    request = GenerationRequest(
        token_ids=session.prompt,
        parameters=SamplingParameters(temperature=0, max_tokens=len(session.output)),
        speculation=_MODES[mode],
    )
    started_s = asyncio.get_running_loop().time()
    generation = await client.complete(request, timeout_s=600)
    total.seconds += asyncio.get_running_loop().time() - started_s
    if tuple(generation.token_ids) != session.output:
        raise RuntimeError(f"the text of {mode} is not the trace's")
    total.num_tokens += len(generation.token_ids)
    total.num_passes += generation.statistics.num_target_passes
    total.num_draft_tokens += generation.statistics.num_draft_tokens
    total.num_accepted_tokens += generation.statistics.num_accepted_tokens
    return generation


def _row(kind: str, mode: str, found: Sequence[_Sum], plain: Sequence[_Sum]) -> dict[str, Any]:
    accepted, drafted = (
        sum(getattr(one, name) for one in found) for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    return {
        "kind": kind,
        "mode": mode,
        "tokens/s": median(one.num_tokens / one.seconds for one in found),
        "tokens/pass": median(one.num_tokens / one.num_passes for one in found),
        "acceptance": accepted / drafted if drafted else None,
        "over plain": median(other.seconds / one.seconds for one, other in zip(found, plain, strict=True)),
    }


def _figures(sums: dict[tuple[str, str], list[_Sum]]) -> dict[str, float]:
    def over(mode: str, other: str) -> dict[str, float]:
        return {
            kind: median(b.seconds / a.seconds for a, b in zip(sums[kind, mode], sums[kind, other], strict=True))
            for kind in KINDS
        }

    over_plain, over_ngram = over(SUFFIX, PLAIN), over(SUFFIX, NGRAM)
    return {
        "suffix_over_plain": prod(over_plain.values()) ** (1 / len(KINDS)),
        "suffix_over_ngram": prod(over_ngram.values()) ** (1 / len(KINDS)),
        **{f"suffix_over_plain_{kind}": value for kind, value in over_plain.items()},
        **{f"suffix_over_ngram_{kind}": value for kind, value in over_ngram.items()},
    }


def plot(result: BenchResult, path: Path) -> None:
    """Plot the speed of every mode for each kind of session."""
    from bench.pictures import bars

    series = {mode: [row["tokens/s"] for row in result.rows if row["mode"] == mode] for mode in _MODES}
    bars(path, list(KINDS), series, "tokens per second")
