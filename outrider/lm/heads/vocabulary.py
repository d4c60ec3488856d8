"""The tokens a draft can say: few and frequent ones, so that its output layer costs little."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import InvalidArgument


@dataclass(frozen=True)
class DraftVocabulary:
    """Which of the target's tokens a draft's logits are for.

    Attributes:
        token_ids: ascending, int64 [draft_size]: draft logit n is for the target's token `token_ids[n]`.
        target_size: V of the target.
    """

    token_ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.token_ids
        if ids.ndim != 1 or not len(ids) or not bool((ids.diff() > 0).all()):
            raise InvalidArgument("token_ids must ascend, without repetition", "vocabulary")
        if int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise InvalidArgument(f"token_ids must be in [0, {self.target_size})", "vocabulary")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, always: Iterable[int] = ()) -> "DraftVocabulary":
        """Returns the vocabulary of the most frequent tokens.

        Args:
            counts: how often each token was met: [V].
            size: tokens wanted; all, where the target has no more.
            always: tokens that are in it however rare, such as the end of a turn.
        """
        order = counts.double()
        order[list(always)] = torch.inf
        chosen = order.argsort(descending=True, stable=True)[: min(size, len(counts))]
        return cls(chosen.sort().values, len(counts))

    @classmethod
    def from_maps(cls, d2t: Tensor, t2d: Tensor) -> "DraftVocabulary":
        """Returns the vocabulary of a checkpoint in EAGLE-3's layout; the reverse of `d2t` and `t2d`.

        Raises:
            InvalidArgument: the two do not tell the same.
        """
        token_ids = d2t.long() + torch.arange(len(d2t))
        if not torch.equal(t2d.bool().nonzero().squeeze(1), token_ids):
            raise InvalidArgument("the maps d2t and t2d contradict each other", "vocabulary")
        return cls(token_ids, len(t2d))

    @property
    def d2t(self) -> Tensor:
        """What to add to a draft token for the target's: int64 [draft_size]."""
        return self.token_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """Which of the target's tokens the draft has: bool [target_size]."""
        return torch.zeros(self.target_size, dtype=torch.bool).index_fill_(0, self.token_ids, True)

    def indices(self, token_ids: Tensor) -> Tensor:
        """Returns where the draft's logits have these tokens; -1 for those it cannot say."""
        places = torch.full((self.target_size,), -1, dtype=torch.long)
        places[self.token_ids] = torch.arange(len(self))
        return places.to(token_ids.device)[token_ids]
