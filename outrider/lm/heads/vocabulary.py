"""Draft vocabularies: the target's most frequent tokens, so that a draft's output layer is small."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from outrider.errors import InvalidArgument


@dataclass(frozen=True)
class DraftVocabulary:
    """A subset of the target's vocabulary, over which a draft's logits are.

    Attributes:
        token_ids: ascending token ids of the target, int64 [draft_size]; draft logit n is of token `token_ids[n]`.
        target_size: V, size of the target's vocabulary.

    Raises:
        InvalidArgument: the token ids do not ascend, or lie outside [0, V).
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
        """Return the vocabulary of the most frequent tokens.

        Args:
            counts: number of occurrences of each token: [V].
            size: size of the vocabulary; all tokens if V is smaller.
            always: tokens to include even if they are rare, such as the end of a turn.
        """
        order = counts.double()
        order[list(always)] = torch.inf
        chosen = order.argsort(descending=True, stable=True)[: min(size, len(counts))]
        return cls(chosen.sort().values, len(counts))

    @classmethod
    def from_maps(cls, d2t: Tensor, t2d: Tensor) -> "DraftVocabulary":
        """Return the vocabulary from the maps of an EAGLE-3 checkpoint; the inverse of `d2t` and `t2d`.

        Raises:
            InvalidArgument: the two maps contradict each other.
        """
        token_ids = d2t.long() + torch.arange(len(d2t))
        if not torch.equal(t2d.bool().nonzero().squeeze(1), token_ids):
            raise InvalidArgument("the maps d2t and t2d contradict each other", "vocabulary")
        return cls(token_ids, len(t2d))

    @cached_property
    def listed_ids(self) -> list[int]:
        """`token_ids` as numbers, for looking up few."""
        ids: list[int] = self.token_ids.tolist()
        return ids

    @property
    def d2t(self) -> Tensor:
        """Offset from each draft token id to the target's token id: int64 [draft_size]."""
        return self.token_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """Mask of the target's tokens that are in the draft vocabulary: bool [target_size]."""
        return torch.zeros(self.target_size, dtype=torch.bool).index_fill_(0, self.token_ids, True)

    def indices(self, token_ids: Tensor) -> Tensor:
        """Return the draft token ids of target token ids, int64 [...]; -1 for tokens outside the draft vocabulary."""
        places = torch.full((self.target_size,), -1, dtype=torch.long)
        places[self.token_ids] = torch.arange(len(self))
        return places.to(token_ids.device)[token_ids]
