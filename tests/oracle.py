"""A plain reference of the next token's distribution in vLLM's order: one position, Python floats, a function per step.

The reference for `outrider.speculation.sampling` and for the served API's logprobs and tokens; it shares no code with
either.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from outrider.parameters import SamplingParameters

IMPOSSIBLE = -math.inf


def reference_distribution(
    logits: Sequence[float],
    parameters: SamplingParameters,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_token_ids: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> list[float]:
    """Return the probability of every token id.

    Args:
        logits: raw logits of every token id; minus infinity for an impossible one.
        parameters: the request's.
        prompt: token ids before the output.
        output: token ids of the output so far.
        stop_token_ids: every token id at which the request ends.
        allowed: token ids that the request's constraint allows; None for all.
    """
    scores = [float(logit) for logit in logits]
    if allowed is not None:
        scores = [score if token_id in allowed else IMPOSSIBLE for token_id, score in enumerate(scores)]
    if len(output) < parameters.min_tokens:
        scores = [IMPOSSIBLE if token_id in stop_token_ids else score for token_id, score in enumerate(scores)]
    scores = [score + parameters.logit_bias.get(token_id, 0.0) for token_id, score in enumerate(scores)]
    scores = penalised(scores, parameters, prompt, output)
    if parameters.temperature == 0:
        first = scores.index(max(scores))
        return [float(token_id == first) for token_id in range(len(scores))]
    top = max(scores)
    scores = [(score - top) / parameters.temperature for score in scores]
    scores = keep_min_p(scores, parameters.min_p)
    scores = keep_top_k(scores, parameters.top_k)
    scores = keep_top_p(scores, parameters.top_p)
    return softmax(scores)


def penalised(
    scores: list[float], parameters: SamplingParameters, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    counts = Counter(output)
    seen = set(prompt) | set(output)
    result = []
    for token_id, score in enumerate(scores):
        if token_id in seen:
            factor = parameters.repetition_penalty
            score = score / factor if score > 0 else score * factor
        score -= parameters.frequency_penalty * counts[token_id]
        if counts[token_id] > 0:
            score -= parameters.presence_penalty
        result.append(score)
    return result


def keep_min_p(scores: list[float], min_p: float) -> list[float]:
    """Drop tokens whose probability is below `min_p` times the largest."""
    distribution = softmax(scores)
    least = min_p * max(distribution)
    return [score if weight >= least else IMPOSSIBLE for score, weight in zip(scores, distribution, strict=True)]


def keep_top_k(scores: list[float], top_k: int) -> list[float]:
    """Drop tokens below the k-th largest; those that tie with it stay."""
    if top_k == 0 or top_k >= len(scores):
        return scores
    least = sorted(scores, reverse=True)[top_k - 1]
    return [score if score >= least else IMPOSSIBLE for score in scores]


def keep_top_p(scores: list[float], top_p: float) -> list[float]:
    """Keep the most likely tokens, the lower id first among equals, until they have `top_p`."""
    if top_p == 1:
        return scores
    distribution = softmax(scores)
    kept: set[int] = set()
    mass = 0.0
    for token_id in sorted(range(len(distribution)), key=lambda token_id: (-distribution[token_id], token_id)):
        if mass >= top_p:
            break
        kept.add(token_id)
        mass += distribution[token_id]
    return [score if token_id in kept else IMPOSSIBLE for token_id, score in enumerate(scores)]


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
