"""The end of a round: its output becomes the session's, the request learns from it, and the verdict is made."""

import time
from typing import Any, NamedTuple

from outrider.errors import OutriderError
from target_service.engine.counters import EngineLoad
from target_service.engine.open_request import OpenRequest
from target_service.engine.results import RoundMetrics, RoundResult, Verdict


class RoundTimes(NamedTuple):
    """Times of a round.

    Attributes:
        model_s: seconds of its pass.
        wait_s: seconds that it waited for a proposal.
        queue_s: seconds that it was ready before its pass began.
        expected_s: seconds that its pass was expected to take; 0 where nothing was measured, or prompts took part.
        is_prefill: whether its pass ran tokens of the prompt or of a replay; the policy does not learn from it then.
    """

    model_s: float
    wait_s: float
    queue_s: float
    expected_s: float
    is_prefill: bool


def conclude(
    request: OpenRequest[Any], result: RoundResult, times: RoundTimes, load: EngineLoad
) -> tuple[Verdict, OutriderError | None]:
    """Append a round's output to its session, and begin the next round.

    Returns:
        The verdict, to be sent, and why the request ends behind it, if it does: its next round cannot begin.

    Args:
        request: the request, as it was before the round.
        result: the round's output.
        times: of the round.
        load: counts it.
    """
    base, resident, speculation = request.base, request.resident, request.speculation
    resident.token_ids += result.token_ids
    request.finished = result.finish_reason is not None
    waited = speculation.waits
    now = time.monotonic()
    if not times.is_prefill:
        rest_s = speculation.lasted_s(now) - times.wait_s - times.queue_s - times.model_s
        speculation.observe(result.num_accepted, result.num_draft_tokens, result.num_nodes, times.wait_s, rest_s)
    expected_s = times.expected_s + (speculation.expected_wait_s if times.expected_s else 0.0)
    hit = speculation.advance(result.token_ids, len(resident.token_ids))
    failure = None
    try:
        request.begin_round(now)
    except OutriderError as error:
        failure = error
    speculation.record_verdict(len(resident.token_ids), now)
    metrics = RoundMetrics(
        model_time_s=times.model_s,
        wait_time_s=times.wait_s,
        queue_time_s=times.queue_s,
        expected_time_s=expected_s,
        num_recomputed=request.num_recomputed,
        hit=hit,
        num_proposed=speculation.num_proposed,
        num_wanted=speculation.num_wanted,
        lookahead=speculation.terms.lookahead if speculation.wants_draft else 0,
    )
    load.record_round(result, metrics, waited=waited, does_without=speculation.does_without)
    if not request.sums.num_rounds:
        request.span.add_event("first_token")
    request.sums.add(result, metrics)
    request.num_recomputed = speculation.num_proposed = 0
    return Verdict(request.handle.number, base, result, metrics), failure
