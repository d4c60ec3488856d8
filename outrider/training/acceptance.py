"""How many of a draft's tokens a target would accept, told from texts that the target wrote.

In a text of the target's own, what a draft guesses is accepted as far as it is the text: a chain's guesses at depth k
count only where all before them were right, and then they were made behind the very text. So one pass over a text gives
the outcome of a round begun at any of its positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """What rounds of drafting came to.

    Attributes:
        num_rounds: rounds.
        num_reached: rounds in which position k was judged, all before it being accepted: [depth].
        num_accepted: rounds in which it was accepted too: [depth].
    """

    num_rounds: int
    num_reached: tuple[int, ...]
    num_accepted: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens a round, the target's own included; 1 where nothing was accepted."""
        return 1 + sum(self.num_accepted) / max(1, self.num_rounds)

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance rate at each position, of the rounds that reached it."""
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
    """Goes through one text in rounds, as drafting would.

    Args:
        is_right: whether the guess at depth k made at column t is the text's token: bool [depth, T]. Its column t
            guesses token t + k + 2, knowing the text up to token t + 1.
        start: index of the answer's first token, at least 1: the target said it by itself, behind the prompt.
        end: the text's length.
    """
    depth = len(is_right)
    lengths = is_right.long().cumprod(0).sum(0).tolist()
    reached, accepted = [0] * depth, [0] * depth
    num_rounds, known = 0, start
    while known + 1 < end:
        room = end - 1 - known  # guesses beyond the text's end are judged by nobody
        length = min(lengths[known - 1], room)
        num_rounds += 1
        for position in range(min(depth, room)):
            reached[position] += position <= length
            accepted[position] += position < length
        known += length + 1
    return Acceptance(num_rounds, tuple(reached), tuple(accepted))


def greedy_matches(logits: Tensor, wanted: Tensor, width: int = 1) -> Tensor:
    """Returns whether the wanted draft token is among the `width` likeliest: bool [...].

    Args:
        logits: of the draft: [..., draft_size].
        wanted: index of the text's token in the draft's vocabulary, -1 where it has none: int64 [...].
        width: children that a node has.
    """
    top = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
    return (top == wanted[..., None]).any(-1)


def coupled_matches(
    logits: Tensor, target_log_probs: Tensor, wanted: Tensor, generator: torch.Generator, width: int = 1
) -> Tensor:
    """Returns whether the draft, ranking by the noise with which the target drew the text, ranks its token that high.

    The text's token is the one with the largest log probability plus Gumbel noise. Given that, the noise is drawn from
    what it may have been: the largest sum is a Gumbel variable, the others are ones cut off there (Maddison et al.
    2014, "top-down" sampling).

    Args:
        logits: of the draft, at temperature 1: [N, draft_size].
        target_log_probs: of the draft's tokens under the target, over all of the target's: float32 [N, draft_size].
        wanted: as in `greedy_matches`: [N].
        generator: on the CPU, for the noise.
        width: children that a node has.

    Returns:
        bool [N].
    """
    known = wanted >= 0
    largest = _gumbel((len(logits), 1), generator).to(logits.device)
    # Of a sum below `largest`, drawn by inverting the cut-off distribution function in logarithms.
    free = target_log_probs + _gumbel(tuple(target_log_probs.shape), generator).to(logits.device)
    sums = -torch.logaddexp(-largest, -free)
    own = torch.nn.functional.one_hot(wanted.clamp(min=0), logits.shape[-1]).bool() & known[:, None]
    noise = torch.where(own, largest, sums) - target_log_probs
    ranked = logits.float().log_softmax(-1) + noise
    return greedy_matches(ranked.masked_fill(noise.isnan(), -torch.inf), wanted, width)


def _gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator).clamp_(1e-20, 1 - 1e-7)
    return -(-uniform.log()).log()
