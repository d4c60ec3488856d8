"""Truncated laws of many rows at once, by the tokens that are left: top_k, min_p and top_p.

A row's result has the same bits whichever rows are beside it: rows meet in comparisons and element by element only, and
what is summed is summed one after the other (`cumsum`), because the order in which `sum` adds depends on the number of
rows.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

_NUCLEUS_GUESS = 1024
"""Tokens among which a nucleus is looked for before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class Support:
    """Tokens that are left of some rows, with a value for each.

    Invariant: every row has a token; rows ascend, and token ids within a row.

    Attributes:
        rows: int64 [M], in [0, num_rows).
        token_ids: int64 [M].
        values: float64 [M].
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
        """Returns the tokens for which the mask, bool [M], holds; there is one in every row."""
        return Support(self.rows[mask], self.token_ids[mask], self.values[mask], self.num_rows)

    def padded(self) -> Tensor:
        """Returns the values in a row each, float64 [R, most tokens in a row]; minus infinity behind a row's last."""
        places = self.places
        empty = self.values.new_full((self.num_rows, int(places.max()) + 1), -inf)
        return empty.index_put_((self.rows, places), self.values)

    def argmax(self) -> Tensor:
        """Returns the token id of each row's largest value; among equals the lowest. int64 [R]."""
        return self.token_ids[self.starts + self.padded().argmax(-1)]

    def ranked(self) -> tuple[Tensor, Tensor]:
        """Returns values and places of each row's tokens, largest first, the lower id first among equals.

        Returns:
            float64 and int64 [R, most tokens in a row]; places are those in `padded`. Minus infinity comes last.
        """
        values, places = self.padded().sort(descending=True, stable=True, dim=-1)
        return values, places

    def dense(self, vocabulary_size: int) -> Tensor:
        """Returns the values at their token ids, float64 [R, V], 0 elsewhere."""
        empty = self.values.new_zeros(self.num_rows, vocabulary_size)
        return empty.index_put_((self.rows, self.token_ids), self.values)


def most_likely(scores: Tensor, nums: Tensor) -> Support:
    """Returns the tokens that are at least as likely as each row's num-th; more than that where they tie with it.

    Args:
        scores: float64 [R, V].
        nums: int64 [R], in [1, V].
    """
    best = scores.topk(int(nums.max()), dim=-1).values
    rows, token_ids = (scores >= best.gather(1, nums.unsqueeze(1) - 1)).nonzero(as_tuple=True)
    return Support(rows, token_ids, scores[rows, token_ids], len(scores))


def top_k_weights(scores: Tensor, top_k: Tensor, min_p: Tensor, top_p: Tensor) -> Support:
    """Returns what top_k leaves, in proportion to probability; then min_p and top_p.

    min_p may come after top_k, because both keep the most likely tokens. Tokens that tie with the k-th stay, as in
    vLLM: which of them would go is not for the order of ids to say.

    Args:
        scores: float64 [R, V], logits over temperature, the largest 0.
        top_k: int64 [R], in [1, V].
        min_p: float64 [R], in [0, 1].
        top_p: float64 [R], in (0, 1].

    Returns:
        Weights in (0, 1].
    """
    ranking = _Ranking.of(_weighed(most_likely(scores, top_k), min_p))
    return ranking.nucleus(ranking.masses[:, -1], top_p)


def top_p_weights(scores: Tensor, min_p: Tensor, top_p: Tensor) -> Support:
    """Returns what min_p and then top_p leave of all tokens; like `top_k_weights`."""
    weights = scores.exp()
    totals = weights.masked_fill_(weights < min_p.unsqueeze(1), 0.0).cumsum(-1)[:, -1]
    num = min(_NUCLEUS_GUESS, scores.shape[-1])
    num = min(_NUCLEUS_GUESS, scores.shape[-1])
    ranking = _Ranking.of(_weighed(most_likely(scores, torch.full_like(totals, num, dtype=torch.int64)), min_p))
    nuclei = ranking.nucleus(totals, top_p)
    short = ranking.masses[:, -1] < totals * top_p
    if num == scores.shape[-1] or not bool(short.any()):
        return nuclei
    return _with_all(nuclei, short.nonzero().squeeze(1), scores, totals, (min_p, top_p))


def _with_all(guess: Support, rows: Tensor, scores: Tensor, totals: Tensor, cuts: tuple[Tensor, Tensor]) -> Support:
    """Returns the guess with the nuclei of `rows` looked for among all tokens instead, one row after the other."""
    parts = [guess.where(~torch.isin(guess.rows, rows))]
    for row in rows.unsqueeze(1):
        every = most_likely(scores[row], torch.full_like(row, scores.shape[-1]))
        nucleus = _Ranking.of(_weighed(every, cuts[0][row])).nucleus(totals[row], cuts[1][row])
        parts.append(Support(row.expand(len(nucleus.rows)), nucleus.token_ids, nucleus.values, 1))
    rows, order = torch.cat([part.rows for part in parts]).sort(stable=True)
    token_ids = torch.cat([part.token_ids for part in parts])[order]
    return Support(rows, token_ids, torch.cat([part.values for part in parts])[order], guess.num_rows)


def _weighed(scores: Support, min_p: Tensor) -> Support:
    """Returns the tokens by their weights, without those below min_p or without any."""
    weights = scores.values.exp()
    left = Support(scores.rows, scores.token_ids, weights, scores.num_rows)
    return left.where((weights > 0) & (weights >= min_p[scores.rows]))


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Weights of some rows, most likely tokens first.

    Attributes:
        weights: the tokens.
        places: their places in `weights.padded()`, int64 [R, most tokens in a row].
        masses: weights up to and with each, float64 [R, most tokens in a row]; a row's last is that of all.
    """

    weights: Support
    places: Tensor
    masses: Tensor

    @classmethod
    def of(cls, weights: Support) -> "_Ranking":
        values, places = weights.ranked()
        return cls(weights, places, values.clamp_(min=0).cumsum(-1))

    def nucleus(self, totals: Tensor, top_p: Tensor) -> Support:
        """Returns the most likely tokens until they have top_p of the totals; among equals, the lower id first."""
        before = self.masses.roll(1, dims=-1)
        before[:, 0] = 0
        # At least one stays, because nothing is before the first; all stay where there is nothing to cut.
        kept = (before < (totals * top_p).unsqueeze(1)) | (top_p == 1).unsqueeze(1)
        chosen = torch.zeros_like(kept).scatter_(1, self.places, kept)
        return self.weights.where(chosen[self.weights.rows, self.weights.places])
