"""The law of the next token: the target's (or the draft's) logits under the request's sampling parameters.

The order is vLLM's: minimum length, logit bias, penalties, then the temperature, min_p, top_k, top_p. Everything is
computed in float64 for one position at a time, so that a position's law depends on its own logits and history alone.
"""

from collections.abc import Collection, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from outrider.parameters import SamplingParameters
from outrider.tokens import TokenLogprobs

_NUCLEUS_GUESS = 1024
"""Tokens among which a nucleus is looked for before the whole vocabulary is sorted."""


class TokenHistory:
    """The tokens before a position, as penalties need them: which are in the prompt, how often which are in the output.

    Args:
        prompt: token ids before the output.
        output: token ids of the output so far.
        parameters: nothing is kept unless they have penalties.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], parameters: SamplingParameters) -> None:
        self.num_output = len(output)
        self._kept = parameters.needs_history
        self._prompt = frozenset(prompt) if self._kept else frozenset()
        self._output: dict[int, int] = {}
        if self._kept:
            self._count(output)

    def extended(self, token_ids: Sequence[int]) -> "TokenHistory":
        """Returns the history with more output, as along a branch of a proposal; this one stays as it is."""
        longer = TokenHistory.__new__(TokenHistory)
        longer.num_output = self.num_output + len(token_ids)
        longer._kept, longer._prompt, longer._output = self._kept, self._prompt, self._output
        if self._kept and token_ids:
            longer._output = dict(self._output)
            longer._count(token_ids)
        return longer

    def seen(self) -> list[int]:
        """Returns the distinct token ids of prompt and output, ascending."""
        return sorted(self._prompt | self._output.keys())

    def output_counts(self) -> tuple[list[int], list[int]]:
        """Returns the distinct token ids of the output, and how often each stands there."""
        return list(self._output), list(self._output.values())

    def _count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._output[token_id] = self._output.get(token_id, 0) + 1


def target_distribution(
    logits: Tensor, parameters: SamplingParameters, history: TokenHistory, stop_token_ids: Collection[int]
) -> Tensor:
    """Returns the law of the next token.

    Args:
        logits: [V], raw, any floating dtype; not changed. Minus infinity where a token is impossible.
        parameters: the request's.
        history: what came before.
        stop_token_ids: not drawn before `min_tokens` output tokens.

    Returns:
        float64 [V], sums to 1; one token has all of it at temperature 0 (ties: the lowest id).

    Raises:
        ValueError: the largest logit is not finite, or one is not a number.
    """
    scores = penalised_logits(logits, parameters, history, stop_token_ids)
    top = scores.argmax()  # a NaN, if there is one
    if not isfinite(scores[top]):
        raise ValueError(f"the largest logit is {float(scores[top])}, must be finite")
    if parameters.is_greedy:
        return torch.zeros_like(scores, dtype=torch.float64).index_fill_(0, top, 1.0)
    # The largest is taken off first, because a small temperature would take it to infinity.
    scores = scores.double() - scores[top].double()
    return _truncated((scores / parameters.temperature).softmax(dim=-1), parameters)


def penalised_logits(
    logits: Tensor, parameters: SamplingParameters, history: TokenHistory, stop_token_ids: Collection[int]
) -> Tensor:
    """Returns the logits [V] after minimum length, logit bias and penalties, in that order.

    They are float64; where nothing applies, the `logits` in at least float32, which changes no value. The repetition
    penalty divides the positive and multiplies the other logits of tokens in prompt or output; the other penalties
    count tokens of the output.
    """
    withheld = stop_token_ids if history.num_output < parameters.min_tokens else ()
    if not (withheld or parameters.logit_bias or parameters.needs_history):
        # An argmax takes several times as long over 16 bits.
        return logits.float() if logits.element_size() < 4 else logits
    scores = logits.to(torch.float64, copy=True)
    if withheld:
        scores[sorted(withheld)] = -inf
    if parameters.logit_bias:
        token_ids = list(parameters.logit_bias)
        scores[token_ids] += scores.new_tensor([parameters.logit_bias[token_id] for token_id in token_ids])
    _penalise(scores, parameters, history)
    return scores


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Returns log-probabilities of raw logits [V]: of the output token, and of the `num_top` most likely."""
    logprobs = logits.double().log_softmax(dim=-1)
    own = logprobs[token_id]
    # Ties are ranked by id, so that rank and list agree.
    rank = int((logprobs > own).sum() + (logprobs[:token_id] == own).sum()) + 1
    top_ids = _most_likely(logprobs, num_top)
    return TokenLogprobs(float(own), rank, tuple(top_ids.tolist()), tuple(logprobs[top_ids].tolist()))


def _penalise(scores: Tensor, parameters: SamplingParameters, history: TokenHistory) -> None:
    penalty = parameters.repetition_penalty
    if penalty != 1 and (seen := history.seen()):
        found = scores[seen]
        scores[seen] = torch.where(found > 0, found / penalty, found * penalty)
    token_ids, counts = history.output_counts()
    if token_ids:
        scores[token_ids] -= parameters.frequency_penalty * scores.new_tensor(counts)
        scores[token_ids] -= parameters.presence_penalty


def _truncated(law: Tensor, parameters: SamplingParameters) -> Tensor:
    """Applies min_p, top_k and top_p to a law [V], in this order, and normalises."""
    if parameters.min_p > 0:
        law = law.masked_fill(law < parameters.min_p * law.max(), 0.0)
    if 0 < parameters.top_k < law.numel():
        # Tokens that tie with the k-th stay, as in vLLM: which of them would go is not for the order of ids to say.
        law = law.masked_fill(law < law.topk(parameters.top_k).values[-1], 0.0)
    if parameters.top_p < 1:
        law = _nucleus(law / law.sum(), parameters.top_p)
    return law / law.sum()


def _nucleus(law: Tensor, top_p: float) -> Tensor:
    """Keeps the most likely tokens until they have `top_p`; among equals, the lower id first."""
    support = law.nonzero().squeeze(1)
    weights = law[support]
    order = _most_likely(weights, _NUCLEUS_GUESS)
    if weights[order].sum() < top_p:
        order = _most_likely(weights, weights.numel())
    ordered = weights[order]
    # At least one stays, because nothing is before the first.
    kept = support[order[ordered.cumsum(0) - ordered < top_p]]
    return torch.zeros_like(law).index_copy_(0, kept, law[kept])


def _most_likely(values: Tensor, num: int) -> Tensor:
    """Returns the token ids of the `num` largest of values [V], largest first; among equals, the lower id first."""
    candidates = torch.arange(values.numel(), device=values.device)
    if num < values.numel():
        # What `topk` returns among equals is not specified, so it gives the threshold only.
        least = values.topk(max(num, 1)).values[-1]
        candidates = (values >= least).nonzero().squeeze(1)
    order = values[candidates].argsort(descending=True, stable=True)[:num]
    return candidates[order]
