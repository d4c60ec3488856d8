"""The plan of a step: which requests take part, and the line that each of them verifies."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.control.allocation import allocate
from outrider.control.pass_times import PassTimes
from outrider.speculation.proposal_tree import Candidate
from target_service.engine.batch_delay import BatchDelay
from target_service.vllm_engine.requests import VllmRequest


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step of vLLM.

    Attributes:
        running: requests that may take part: those that decode, and those whose prompts are run.
        lines: tokens to verify, by vLLM's id of the request.
        held: vLLM's ids of the requests that take no part.
        delays: of each request that decodes, by number: seconds that it waited for its proposal, and seconds that it
            was ready before the step.
        expected_s: seconds that a round of the step is expected to take; 0 with prompts in it, or no measurement.
    """

    running: Sequence[VllmRequest]
    lines: Mapping[str, Sequence[int]]
    held: frozenset[str]
    delays: Mapping[int, tuple[float, float]]
    expected_s: float


def plan_step(
    requests: Collection[VllmRequest], delay: BatchDelay, times: PassTimes, max_rows: int, max_len: int, now: float
) -> StepPlan | None:
    """Return the next step; None where no request may take part now.

    Args:
        requests: those that are open.
        delay: holds a step back for requests that will be ready soon.
        times: of steps; they decide how many tokens are verified.
        max_rows: rows of a step, at most.
        max_len: longest session, in tokens.
        now: monotonic time.
    """
    inside = [request for request in requests if request.is_inside]
    prompts = [request for request in inside if request.is_prefilling]
    decoding = [request for request in inside if request.may_decode]
    ready = [request for request in decoding if request.is_ready(now)]
    if not prompts and delay.holds(decoding, ready, now):
        return None
    delay.end()
    if not prompts and not ready:
        return None
    running = [*prompts, *ready]
    kept = {request.number for request in running}
    lines = dict(_lines(ready, times, max_rows, max_len, now))
    num_rows = len(ready) + sum(map(len, lines.values()))
    expected_s = 0.0
    if times.known and not prompts:
        expected_s = times.round_s(num_rows, speculates=any(request.speculation.waits for request in ready))
    return StepPlan(
        running=running,
        lines=lines,
        held=frozenset(request.vllm_id for request in inside if request.number not in kept),
        delays={request.number: _delays(request, now) for request in ready},
        expected_s=expected_s,
    )


def _lines(
    ready: Sequence[VllmRequest], times: PassTimes, max_rows: int, max_len: int, now: float
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the line that each request verifies: all share the step's time, so tokens are taken while they pay."""
    offers = [
        request.speculation.line(min(request.room, max_len - len(request.resident.token_ids))) for request in ready
    ]
    wait_s = sum(request.speculation.waited_s(now) for request in ready) / max(1, len(ready))
    candidates = [[Candidate(number, value) for number, value in enumerate(values)] for values, _ in offers]
    chosen = allocate(candidates, float(len(ready)), len(ready), max_rows, times, wait_s)
    for request, (_, token_ids), numbers in zip(ready, offers, chosen, strict=True):
        if numbers:
            yield request.vllm_id, token_ids[: len(numbers)]


def _delays(request: VllmRequest, now: float) -> tuple[float, float]:
    wait_s = request.speculation.waited_s(now)
    return wait_s, max(0.0, now - request.round_started - wait_s)
