"""The law of the next token: the target's (or the draft's) logits under the request's sampling parameters.

The order is vLLM's: minimum length, logit bias, penalties, then the temperature, min_p, top_k, top_p. Everything is computed
in float64 for one position at a time, so that a position's law depends on its own logits and history alone.
"""

from collections.abc import Collection, Sequence

import torch

from outrider.parameters import SamplingParameters
from outrider.tokens import TokenLogprobs


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
            for token_id in output:
                self._output[token_id] = self._output.get(token_id, 0) + 1

    def extended(self, token_ids: Sequence[int]) -> "TokenHistory":
        """Returns the history with more output, as along a branch of a proposal."""
        longer = TokenHistory.__new__(TokenHistory)
        longer.num_output = self.num_output + len(token_ids)
        longer._kept, longer._prompt, longer._output = self._kept, self._prompt, self._output
        if self._kept and token_ids:
            longer._output = dict(self._output)
            for token_id in token_ids:
                longer._output[token_id] = longer._output.get(token_id, 0) + 1
        return longer

    def seen(self) -> list[int]:
        """Returns the distinct token ids of prompt and output, ascending."""
        return sorted(self._prompt | self._output.keys())

    def output_counts(self) -> tuple[list[int], list[int]]:
        """Returns the distinct token ids of the output, and how often each stands there."""
        return list(self._output), list(self._output.values())


def target_distribution(
    logits: torch.Tensor, parameters: SamplingParameters, history: TokenHistory, stop_token_ids: Collection[int]
) -> torch.Tensor:
    """Returns the law of the next token.

    Args:
        logits: [V], raw, any floating dtype; not changed.
        parameters: the request's.
        history: what came before.
        stop_token_ids: not drawn before `min_tokens` output tokens.

    Returns:
        float64 [V], sums to 1; one token has all of it at temperature 0 (ties: the lowest id).
    """
    scores = penalised_logits(logits, parameters, history, stop_token_ids)
    if parameters.is_greedy:
        law = torch.zeros_like(scores)
        law[scores.argmax()] = 1.0
        return law
    return _truncated((scores / parameters.temperature).softmax(dim=-1), parameters)


def penalised_logits(
    logits: torch.Tensor, parameters: SamplingParameters, history: TokenHistory, stop_token_ids: Collection[int]
) -> torch.Tensor:
    """Returns the logits, float64 [V], after minimum length, logit bias and penalties."""
    scores = logits.double() if logits.dtype != torch.float64 else logits.clone()
    if history.num_output < parameters.min_tokens and stop_token_ids:
        scores[sorted(stop_token_ids)] = float("-inf")
    if parameters.logit_bias:
        token_ids = list(parameters.logit_bias)
        scores[token_ids] += scores.new_tensor([parameters.logit_bias[token_id] for token_id in token_ids])
    if parameters.repetition_penalty != 1 and (seen := history.seen()):
        found = scores[seen]
        penalty = parameters.repetition_penalty
        scores[seen] = torch.where(found > 0, found / penalty, found * penalty)
    token_ids, counts = history.output_counts()
    if token_ids:
        scores[token_ids] -= parameters.frequency_penalty * scores.new_tensor(counts)
        scores[token_ids] -= parameters.presence_penalty
    return scores


def _truncated(law: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Applies min_p, top_k and top_p to a law [V], in this order, and normalises."""
    size = law.shape[-1]
    if parameters.min_p > 0:
        law = law.masked_fill(law < parameters.min_p * law.max(), 0.0)
    if 0 < parameters.top_k < size:
        # Tokens that tie with the k-th stay, as in vLLM: which of them would go is not for the order of ids to say.
        law = law.masked_fill(law < law.topk(parameters.top_k).values[-1], 0.0)
    if parameters.top_p < 1:
        law = _nucleus(law / law.sum(), parameters.top_p)
    return law / law.sum()


def _nucleus(law: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the most likely tokens until they have `top_p`; among equals, the lower id first."""
    support = torch.nonzero(law).squeeze(1)
    ordered, order = torch.sort(law[support], descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = support[order[(before < top_p) | (torch.arange(len(order), device=law.device) == 0)]]
    cut = torch.zeros_like(law)
    cut[kept] = law[kept]
    return cut


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Returns log-probabilities of raw logits [V]: of the output token, and of the `num_top` most likely."""
    logprobs = logits.double().log_softmax(dim=-1)
    own = logprobs[token_id]
    # Ties are ranked by id, so that rank and list agree.
    rank = int((logprobs > own).sum() + (logprobs[:token_id] == own).sum()) + 1
    ordered = torch.sort(logprobs, descending=True, stable=True) if num_top else None
    top_ids = ordered.indices[:num_top].tolist() if ordered else []
    return TokenLogprobs(float(own), rank, tuple(top_ids), tuple(logprobs[top_ids].tolist()))
