"""A head's pass by native operators, and by PyTorch where there are none: the same but for roundings."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider import native
from outrider.lm.heads.block import BlockConfig, BlockHead, Transition
from outrider.lm.heads.block_passes import TransitionPass
from outrider.lm.heads.columns import Columns, Rows
from outrider.lm.heads.passes import HeadPasses, joined
from outrider.lm.packed_linear import NativeLinear
from tests.lm.heads.models import WIDTH, make_head

pytestmark = pytest.mark.skipif(native.best_variant() is None, reason="no native operators here")
NUM_ROWS = 5


def rows(width: int = WIDTH) -> Tensor:
    return torch.randn(NUM_ROWS, width).bfloat16()


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found.float() - expected.float()).norm() < 0.03 * expected.float().norm()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(2)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_the_parts_of_a_pass(monkeypatch: pytest.MonkeyPatch, *, norm_before_residual: bool) -> None:
    head = make_head(norm_before_residual).requires_grad_(False).bfloat16()
    passes = HeadPasses(head, torch.randn(64, WIDTH).bfloat16())
    assert passes._variant is not None
    embeddings, hidden, positions = rows(), rows(), torch.tensor([0, 7, 7, 3, 100])
    attended = rows(passes._num_heads * passes.head_dim)

    def parts() -> list[Tensor]:
        projected = passes.project(embeddings, hidden, positions)
        return [*projected, passes.finish(attended, hidden), *passes.logits(hidden)]

    found = parts()
    monkeypatch.setattr(passes, "_variant", None)
    for one, other in zip(found, parts(), strict=True):
        assert_near(one, other)


def block_head() -> BlockHead:
    """Returns a head whose weights are random, those of its mask rows too."""
    head = BlockHead(BlockConfig(make_head().config, 4, 6)).requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(std=0.2 if parameter.ndim > 1 else 1.0)
    return head.bfloat16()


def attended(passes: HeadPasses, rows: Rows, keys: Tensor, values: Tensor) -> Tensor:
    """Returns the outputs of rows by the parts of a pass, and stores their keys and values, [slots, heads, dim]."""
    query, key, value, residual = passes.project(rows.embeddings, rows.hidden, torch.tensor(rows.positions))
    end = rows.first + rows.num_rows
    keys[rows.first : end], values[rows.first : end] = key.transpose(0, 1), value.transpose(0, 1)
    mask = torch.ones(rows.num_rows, end, dtype=torch.bool).tril(rows.first)
    seen = [item[None, :end].transpose(1, 2) for item in (keys, values)]
    found = functional.scaled_dot_product_attention(query[None], *seen, attn_mask=mask, enable_gqa=True)
    return passes.finish(found[0].transpose(0, 1).flatten(1), residual)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_new_columns_of_sessions(*, norm_before_residual: bool) -> None:
    head = block_head()
    head.midlayer.norm_before_residual = norm_before_residual
    passes = HeadPasses(head, torch.randn(64, WIDTH).bfloat16())
    assert passes.has_columns
    features = head.config.target_hidden_size * 3
    # The beginning of a text, its end with a block behind it, and one column that crosses into a session's second page.
    sessions = [
        Columns(rows(features), [1, 63, 0, 5, 9], 0),
        Columns(rows(features)[:2], [7, 7], 3, num_masks=3),
        Columns(rows(features)[:1], [2], 31, num_masks=2),
    ]
    heads = passes.num_kv_heads, passes.head_dim
    caches = [[torch.randn(64, *heads).bfloat16() for _ in range(2)] for _ in sessions]
    expected_caches = [[item.clone() for item in both] for both in caches]
    found = passes.columns(sessions, *(list(item) for item in zip(*caches, strict=True)))
    expected = [
        attended(passes, passes.rows(item), *cache)[-item.num_outputs :]
        for item, cache in zip(sessions, expected_caches, strict=True)
    ]
    assert_near(found, torch.cat(expected))
    for both, expected_both in zip(caches, expected_caches, strict=True):
        for one, other in zip(both, expected_both, strict=True):
            assert_near(one, other)


def test_the_logits_after_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    transition = Transition(WIDTH, 12, 40).requires_grad_(False)
    transition.output.weight.normal_()
    passes = TransitionPass(transition.bfloat16(), torch.randn(64, WIDTH).bfloat16())
    assert passes._variant is not None
    logits, states = torch.randn(3, 40).bfloat16(), passes.states(rows()[:3])
    found = passes.logits(logits, states, [0, 2, 2, 1], [5, 63, 0, 5])
    monkeypatch.setattr(passes, "_variant", None)
    assert_near(found, passes.logits(logits, states, [0, 2, 2, 1], [5, 63, 0, 5]))


def test_more_inputs_than_a_sum_of_bytes_holds_are_not_in_bytes() -> None:
    wide = nn.Linear(native.MOST_BYTE_INPUTS + 2, 3, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    given = torch.randn(2, wide.in_features).bfloat16()
    layer = joined(wide)
    assert isinstance(layer, NativeLinear)
    assert_near(layer(given), wide(given))
