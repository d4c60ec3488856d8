"""Attention in blocks: equal to the formula, and independent of the numbers of rows and blocks of a pass."""

import pytest
import torch

from outrider.lm.attention.blocks import BLOCK_LEN, block_attention

pytestmark = pytest.mark.usefixtures("two_threads")

HEADS, DIM = 3, 64


def _blocks(num_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (num_blocks, HEADS, BLOCK_LEN, DIM)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def _bias(positions: torch.Tensor, num_blocks: int) -> torch.Tensor:
    seen = torch.arange(num_blocks * BLOCK_LEN) <= positions[:, None]
    bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    return bias.view(-1, num_blocks, 1, BLOCK_LEN).permute(1, 2, 0, 3).contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_formula(dtype: torch.dtype) -> None:
    keys, values = _blocks(3, dtype)
    positions = torch.tensor([0, 5, 255, 256, 700])
    query = torch.randn(HEADS, len(positions), DIM, generator=torch.Generator().manual_seed(2))
    output = block_attention(query, keys, values, _bias(positions, 3))
    flat_keys, flat_values = (blocks.permute(1, 0, 2, 3).reshape(HEADS, -1, DIM).double() for blocks in (keys, values))
    for row, position in enumerate(positions.tolist()):
        seen = slice(0, position + 1)
        scores = torch.einsum("hd,hnd->hn", query[:, row].double(), flat_keys[:, seen])
        expected = torch.einsum("hn,hnd->hd", scores.softmax(-1), flat_values[:, seen])
        assert torch.allclose(output[:, row].double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_depend_on_neither_rows_nor_later_blocks(dtype: torch.dtype) -> None:
    keys, values = _blocks(4, dtype)
    positions = torch.arange(200, 264)
    query = torch.randn(HEADS, 64, DIM, generator=torch.Generator().manual_seed(3))
    whole = block_attention(query, keys, values, _bias(positions, 4))
    for num_rows in (4, 5, 6, 7, 8, 16, 17, 33):
        for num_blocks in (2, 3, 4):
            rows = slice(64 - num_rows, 64)
            bias = _bias(positions[rows], num_blocks)
            part = block_attention(query[:, rows], keys[:num_blocks], values[:num_blocks], bias)
            assert torch.equal(part, whole[:, rows]), (num_rows, num_blocks)


def test_softcap_bounds_the_scores() -> None:
    keys, values = _blocks(1, torch.float32)
    query = torch.full((HEADS, 4, DIM), 100.0)
    bias = _bias(torch.full((4,), BLOCK_LEN - 1), 1)
    nearly_uniform = block_attention(query, keys, values, bias, softcap=1e-6)
    assert torch.allclose(nearly_uniform, values[0].mean(1, keepdim=True).expand(HEADS, 4, DIM), atol=1e-4)
