"""Log-probabilities: compared with a plain ranking, and independent of the other rows."""

import math

import pytest
import torch

from outrider.speculation.logprobs import token_logprobs

V = 40


def random_logits(num: int, size: int = V) -> torch.Tensor:
    return torch.randn(num, size, generator=torch.Generator().manual_seed(num)) * 2


@pytest.mark.parametrize("num_top", [0, 1, 5, V])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_are_of_the_raw_logits(num_top: int, dtype: torch.dtype) -> None:
    logits = random_logits(1)[0].to(dtype)
    logprobs = logits.double().log_softmax(-1).tolist()
    order = sorted(range(V), key=lambda token_id: (-logprobs[token_id], token_id))
    results = token_logprobs(logits.expand(V, -1), range(V), [num_top] * V)
    for token_id, result in enumerate(results):
        assert result.logprob == pytest.approx(logprobs[token_id])
        assert order[result.rank - 1] == token_id
        assert list(result.top_token_ids) == order[:num_top]
        assert list(result.top_logprobs) == pytest.approx([logprobs[top_id] for top_id in order[:num_top]])


@pytest.mark.parametrize("size", [16, 1001, 49152])
def test_a_row_is_the_same_alone_and_beside_others(size: int) -> None:
    logits = random_logits(37, size).bfloat16()  # bfloat16 makes ties
    token_ids, nums = [row * 7 % size for row in range(37)], [row % 6 for row in range(37)]
    together = token_logprobs(logits, token_ids, nums)
    alone = [token_logprobs(logits[[row]], token_ids[row : row + 1], nums[row : row + 1])[0] for row in range(37)]
    assert together == alone


def test_impossible_tokens_rank_last() -> None:
    (result,) = token_logprobs(torch.tensor([[-math.inf, 1.0, -math.inf]]), [2], [3])
    assert (result.logprob, result.rank, result.top_token_ids) == (-math.inf, 3, (1, 0, 2))
