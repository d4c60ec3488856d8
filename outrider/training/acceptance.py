"""Acceptance of a draft's tokens, measured on texts that the target generated.

The target would accept a draft's tokens as far as they equal the target's text: the prediction at depth k counts only
if all previous ones are correct, and then it was made after this same text. So one pass over a text yields the outcome
of a round that starts at any of its positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Acceptance counts over rounds.

    Attributes:
        num_rounds: number of rounds.
        num_reached: rounds in which all tokens before position k were accepted: [depth].
        num_accepted: rounds in which position k was accepted too: [depth].
    """

    num_rounds: int
    num_reached: tuple[int, ...]
    num_accepted: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens per round, including the recovered or bonus token; 1 if nothing was accepted."""
        return 1 + sum(self.num_accepted) / max(1, self.num_rounds)

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance rate at each position, in [0, 1], of the rounds that reached it."""
        return tuple(
            hit / reached if reached else 0.0 for hit, reached in zip(self.num_accepted, self.num_reached, strict=True)
        )

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.num_rounds + other.num_rounds,
            tuple(map(sum, zip(self.num_reached, other.num_reached, strict=True))),
            tuple(map(sum, zip(self.num_accepted, other.num_accepted, strict=True))),
        )


def walk(is_right: Tensor, start: int, end: int) -> Acceptance:
    """Return the acceptance of a text that is generated in rounds of drafting.

    Args:
        is_right: whether the prediction at depth k and column t equals the text's token: bool [depth, T]. Column t
            predicts token t + k + 2 from the text up to token t + 1.
        start: index of the answer's first token, at least 1; the target generates this token without a draft.
        end: length of the text, in tokens.
    """
    depth = len(is_right)
    lengths = is_right.long().cumprod(0).sum(0).tolist()
    reached, accepted = [0] * depth, [0] * depth
    num_rounds, known = 0, start
    while known + 1 < end:
        room = end - 1 - known  # predictions beyond the text's end are not counted
        length = min(lengths[known - 1], room)
        num_rounds += 1
        for position in range(min(depth, room)):
            reached[position] += position <= length
            accepted[position] += position < length
        known += length + 1
    return Acceptance(num_rounds, tuple(reached), tuple(accepted))


def greedy_matches(logits: Tensor, wanted: Tensor, width: int = 1) -> Tensor:
    """Return whether the wanted token is among the `width` most likely draft tokens: bool [...].

    Args:
        logits: logits of the draft [..., draft_size].
        wanted: draft token id of the text's token, -1 if it is not in the draft vocabulary: int64 [...].
        width: children that a node has.
    """
    top = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
    return (top == wanted[..., None]).any(-1)


def coupled_matches(
    logits: Tensor, target_log_probs: Tensor, wanted: Tensor, generator: torch.Generator, width: int = 1
) -> Tensor:
    """Return whether the draft ranks the text's token among its first `width` choices under the target's noise.

    The text's token has the largest sum of log-probability and Gumbel noise. The noise is sampled from its conditional
    distribution given that token: the largest sum is a Gumbel variable, and all other sums are truncated at it
    (Maddison et al. 2014, "A* Sampling", top-down sampling).

    Args:
        logits: logits of the draft at temperature 1: [N, draft_size].
        target_log_probs: the target's log-probabilities of the draft's tokens: float32 [N, draft_size].
        wanted: as in `greedy_matches`: [N].
        generator: of the noise, on the device of the logits.
        width: children that a node has.

    Returns:
        bool [N].
    """
    known = wanted >= 0
    largest = _gumbel((len(logits), 1), generator)
    # Sums truncated at `largest`, by inversion of the truncated distribution function in log space.
    free = target_log_probs + _gumbel(tuple(target_log_probs.shape), generator)
    sums = -torch.logaddexp(-largest, -free)
    own = torch.nn.functional.one_hot(wanted.clamp(min=0), logits.shape[-1]).bool() & known[:, None]
    noise = torch.where(own, largest, sums) - target_log_probs
    ranked = logits.float().log_softmax(-1) + noise
    return greedy_matches(ranked.masked_fill(noise.isnan(), -torch.inf), wanted, width)


def _gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator, device=generator.device).clamp_(1e-20, 1 - 1e-7)
    return -(-uniform.log()).log()
