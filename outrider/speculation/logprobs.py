"""Batched log-probabilities of output tokens."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from outrider.speculation.truncation import Support, most_likely
from outrider.tokens import TokenLogprobs

# Float64 rows per chunk; constant, because the order in which a row is summed can depend on the number of rows.
_NUM_ROWS: Final = 16


def token_logprobs(logits: Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the natural log-probabilities of the output tokens and of the most likely tokens.

    Args:
        logits: raw logits [R, V], any floating dtype.
        token_ids: the output token of each row, R values in [0, V).
        nums_top: number of most likely tokens to report for each row, R values in [0, V].
    """
    results: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _NUM_ROWS):
        part = slice(start, start + _NUM_ROWS)
        results += _of_chunk(logits[part], token_ids[part], nums_top[part])
    return results


def _of_chunk(logits: Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.double().log_softmax(dim=-1)
    own, ranks = _ranked(logprobs, torch.tensor(token_ids, device=logits.device))
    top_values, top_ids = _top(logprobs, max(*nums_top, 1))
    host = torch.cat((torch.stack((own, ranks.double()), dim=1), top_values, top_ids.double()), dim=1).tolist()
    return [_result(row, num_top, top_values.shape[1]) for row, num_top in zip(host, nums_top, strict=True)]


def _result(row: list[float], num_top: int, width: int) -> TokenLogprobs:
    top_ids = tuple(int(token_id) for token_id in row[2 + width : 2 + width + num_top])
    return TokenLogprobs(row[0], int(row[1]), top_ids, tuple(row[2 : 2 + num_top]))


def _ranked(logprobs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens' log-probabilities, float64 [R], and their ranks, int64 [R], from 1."""
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    # Ties are ranked by id, so that rank and list agree.
    is_lower = torch.arange(logprobs.shape[-1], device=logprobs.device) < token_ids.unsqueeze(1)
    ahead = (logprobs > own) | ((logprobs == own) & is_lower)
    return own.squeeze(1), ahead.sum(-1) + 1


def _top(logprobs: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the `num` largest, float64 [R, num], and their ids, int64 [R, num], in descending order, ties by id."""
    likely: Support = most_likely(logprobs, torch.full((len(logprobs),), num, device=logprobs.device))
    values, places = likely.ranked()
    return values[:, :num], likely.token_ids[likely.starts.unsqueeze(1) + places[:, :num]]
