"""Batched truncation of distributions to their most likely tokens: top_k, min_p and top_p.

The bits of a row's result do not depend on the other rows: all operations are comparisons or elementwise, and sums are
sequential (`cumsum`), because the order in which `sum` adds depends on the number of rows.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

_NUCLEUS_GUESS = 1024
"""Number of most likely tokens in which a nucleus is searched before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class Support:
    """The remaining tokens of some rows, with a value each.

    Invariant: every row has at least one token; rows ascend, and token ids ascend within a row.

    Attributes:
        rows: int64 [M], in [0, num_rows).
        token_ids: int64 [M].
        values: float64 [M], logits or weights.
        num_rows: R.
    """

    rows: Tensor
    token_ids: Tensor
    values: Tensor
    num_rows: int

    @property
    def starts(self) -> Tensor:
        """Index of each row's first token, int64 [R]."""
        return torch.searchsorted(self.rows, torch.arange(self.num_rows, device=self.rows.device))

    @property
    def places(self) -> Tensor:
        """Number of each token within its row, from 0; int64 [M]."""
        return torch.arange(len(self.rows), device=self.rows.device) - self.starts[self.rows]

    def where(self, mask: Tensor) -> "Support":
        """Return the tokens for which the mask, bool [M], is true; it must be true for one token of every row."""
        return Support(self.rows[mask], self.token_ids[mask], self.values[mask], self.num_rows)

    def padded(self) -> Tensor:
        """Return the values of each row padded with minus infinity, float64 [R, most tokens in a row]."""
        places = self.places
        empty = self.values.new_full((self.num_rows, int(places.max()) + 1), -inf)
        return empty.index_put_((self.rows, places), self.values)

    def argmax(self) -> Tensor:
        """Return the token id of each row's largest value, ties to the lowest id: int64 [R]."""
        return self.token_ids[self.starts + self.padded().argmax(-1)]

    def ranked(self) -> tuple[Tensor, Tensor]:
        """Return values and places of each row's tokens in descending order of value, ties by token id.

        Returns:
            float64 and int64 [R, most tokens in a row]; places index the rows of `padded`. Padding comes last.
        """
        values, places = self.padded().sort(descending=True, stable=True, dim=-1)
        return values, places

    def dense(self, vocabulary_size: int) -> Tensor:
        """Return the values at their token ids, float64 [R, V], 0 elsewhere."""
        empty = self.values.new_zeros(self.num_rows, vocabulary_size)
        return empty.index_put_((self.rows, self.token_ids), self.values)


def most_likely(scores: Tensor, nums: Tensor) -> Support:
    """Return each row's `num` most likely tokens, and those that tie with the last of them.

    Args:
        scores: float64 [R, V].
        nums: int64 [R], in [1, V].
    """
    best = scores.topk(int(nums.max()), dim=-1).values
    rows, token_ids = (scores >= best.gather(1, nums.unsqueeze(1) - 1)).nonzero(as_tuple=True)
    return Support(rows, token_ids, scores[rows, token_ids], len(scores))


def top_k_weights(scores: Tensor, top_k: Tensor, min_p: Tensor, top_p: Tensor) -> Support:
    """Return the tokens that remain after top_k, min_p and top_p, with weights proportional to probability.

    min_p may be applied after top_k, because both keep the most likely tokens. Tokens that tie with the k-th remain, as
    in vLLM.

    Args:
        scores: logits divided by temperature, float64 [R, V], the largest of each row 0.
        top_k: int64 [R], in [1, V].
        min_p: float64 [R], in [0, 1].
        top_p: float64 [R], in (0, 1].

    Returns:
        Weights in (0, 1].
    """
    ranking = _Ranking.of(_weighed(most_likely(scores, top_k), min_p))
    return ranking.nucleus(ranking.masses[:, -1], top_p)


def top_p_weights(scores: Tensor, min_p: Tensor, top_p: Tensor) -> Support:
    """Return the tokens that remain after min_p and top_p; arguments and result as of `top_k_weights`."""
    weights = scores.exp()
    totals = weights.masked_fill_(weights < min_p.unsqueeze(1), 0.0).cumsum(-1)[:, -1]
    num = min(_NUCLEUS_GUESS, scores.shape[-1])
    ranking = _Ranking.of(_weighed(most_likely(scores, torch.full_like(totals, num, dtype=torch.int64)), min_p))
    nuclei = ranking.nucleus(totals, top_p)
    short = ranking.masses[:, -1] < totals * top_p
    if num == scores.shape[-1] or not bool(short.any()):
        return nuclei
    return _with_all(nuclei, short.nonzero().squeeze(1), scores, totals, (min_p, top_p))


def _with_all(guess: Support, rows: Tensor, scores: Tensor, totals: Tensor, cuts: tuple[Tensor, Tensor]) -> Support:
    """Return `guess` with the nuclei of `rows` recomputed over the whole vocabulary, one row at a time."""
    parts = [guess.where(~torch.isin(guess.rows, rows))]
    for row in rows.unsqueeze(1):
        every = most_likely(scores[row], torch.full_like(row, scores.shape[-1]))
        nucleus = _Ranking.of(_weighed(every, cuts[0][row])).nucleus(totals[row], cuts[1][row])
        parts.append(Support(row.expand(len(nucleus.rows)), nucleus.token_ids, nucleus.values, 1))
    rows, order = torch.cat([part.rows for part in parts]).sort(stable=True)
    token_ids = torch.cat([part.token_ids for part in parts])[order]
    return Support(rows, token_ids, torch.cat([part.values for part in parts])[order], guess.num_rows)


def _weighed(scores: Support, min_p: Tensor) -> Support:
    """Return the tokens with their weights, without those whose weight is 0 or below min_p."""
    weights = scores.values.exp()
    left = Support(scores.rows, scores.token_ids, weights, scores.num_rows)
    return left.where((weights > 0) & (weights >= min_p[scores.rows]))


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The weights of some rows in descending order.

    Attributes:
        weights: the tokens with their weights.
        places: their places in `weights.padded()`, int64 [R, most tokens in a row].
        masses: cumulative sums of the sorted weights, float64 [R, most tokens in a row]; a row's last is its total.
    """

    weights: Support
    places: Tensor
    masses: Tensor

    @classmethod
    def of(cls, weights: Support) -> "_Ranking":
        values, places = weights.ranked()
        return cls(weights, places, values.clamp_(min=0).cumsum(-1))

    def nucleus(self, totals: Tensor, top_p: Tensor) -> Support:
        """Return each row's smallest set of most likely tokens with a share of at least top_p, ties by token id."""
        before = self.masses.roll(1, dims=-1)
        before[:, 0] = 0
        # The first token always remains, because the sum before it is 0; all remain if top_p is 1.
        kept = (before < (totals * top_p).unsqueeze(1)) | (top_p == 1).unsqueeze(1)
        chosen = torch.zeros_like(kept).scatter_(1, self.places, kept)
        return self.weights.where(chosen[self.weights.rows, self.weights.places])
