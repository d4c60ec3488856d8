"""A head's pass by native operators, and by PyTorch where there are none: the same but for roundings."""

import pytest
import torch
from torch import Tensor, nn

from outrider import native
from outrider.lm.heads.block import Transition
from outrider.lm.heads.passes import HeadPasses, TransitionPass, joined
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
    passes = HeadPasses(head)
    assert passes._variant is not None
    embeddings, hidden, positions = rows(), rows(), torch.tensor([0, 7, 7, 3, 100])
    attended = rows(passes._num_heads * passes._head_dim)

    def parts() -> list[Tensor]:
        projected = passes.project(embeddings, hidden, positions)
        return [*projected, passes.finish(attended, hidden), *passes.logits(hidden)]

    found = parts()
    monkeypatch.setattr(passes, "_variant", None)
    for one, other in zip(found, parts(), strict=True):
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
