"""A block head: what it says at some columns is what it says there where it runs at all of them."""

import pytest
import torch

from outrider.lm.heads.block import BlockConfig, BlockHead
from outrider.lm.heads.eagle3 import Eagle3Head
from tests.lm.heads.models import WIDTH, make_head

LENGTH, BLOCK_SIZE = 11, 4


def _block(like: Eagle3Head) -> BlockHead:
    head = BlockHead(BlockConfig(like.config, BLOCK_SIZE, 8)).double()
    head.load_state_dict(like.state_dict(), strict=False)
    for item in (head.mask_embeddings, head.mask_features, head.transition.output.weight):
        torch.nn.init.normal_(item, std=0.5)
    return head


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("first", range(3))
def test_blocks_at_some_columns_are_those_at_every_column(first: int, norm_before_residual: bool) -> None:
    head = _block(make_head(norm_before_residual))
    features = torch.randn(2, LENGTH, 3 * WIDTH, dtype=torch.float64)
    anchors = [torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)]
    columns = slice(first, None, 3)
    rows = list(head.unroll(features, anchors, columns))
    assert len(rows) == BLOCK_SIZE
    for whole, some in zip(head.unroll(features, anchors), rows, strict=True):
        assert some.shape == (2, len(range(LENGTH)[columns]), WIDTH)
        assert torch.allclose(some, whole[:, columns], atol=1e-6)
