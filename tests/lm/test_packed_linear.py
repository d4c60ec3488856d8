"""Packed linear layers of both kinds: the values of the layers they replace, alone or joined."""

import gc
import weakref

import pytest
import torch
from torch import nn

from outrider import native
from outrider.lm import packed_linear
from outrider.lm.packed_linear import (
    NativeLinear,
    OneDnnLinear,
    PackedLinear,
    PackedPart,
    are_all_packed,
    pack_linears,
    packed_kind,
)

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(params=[NativeLinear, OneDnnLinear], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[PackedLinear]:
    """The kind of packed layers."""
    if request.param is OneDnnLinear:
        monkeypatch.setattr(native, "best_variant", lambda: None)
    if packed_kind() is not request.param:
        pytest.skip("this CPU cannot run it")
    return request.param


class Attention(nn.Module):
    def __init__(self, *, bias: bool, odd: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16)
        self.k_proj = nn.Linear(64, 32, bias=bias != odd, dtype=torch.bfloat16)
        self.v_proj = nn.Linear(64, 32, bias=bias, dtype=torch.bfloat16)
        self.o_proj = nn.Linear(96, 64, bias=bias, dtype=torch.bfloat16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)], -1)
        return torch.cat([whole, self.o_proj(whole[..., :96])], -1)


@pytest.mark.parametrize("joins", [False, True])
@torch.no_grad()
def test_packing_changes_at_most_the_order_of_a_sum(kind: type[PackedLinear], joins: bool) -> None:
    torch.manual_seed(1)
    module = Attention(bias=False)
    rows = torch.randn(2, 8, 64).bfloat16()
    expected = module(rows)
    assert pack_linears(module, joins=joins) == kind.kind()
    assert isinstance(module.q_proj, PackedPart if joins else kind)
    assert isinstance(module.o_proj, kind)
    assert torch.equal(module(rows), expected) or (
        kind is NativeLinear and torch.allclose(module(rows).float(), expected.float(), atol=0.02)
    )


@pytest.mark.parametrize(("num_in", "num_out"), [(2048, 3072), (576, 1536), (1536, 576), (64, 192), (48, 20)])
@torch.no_grad()
def test_bits_do_not_depend_on_the_number_of_rows(kind: type[PackedLinear], num_in: int, num_out: int) -> None:
    torch.manual_seed(3)
    module = kind(nn.Linear(num_in, num_out, bias=False, dtype=torch.bfloat16))
    rows = torch.randn(64, num_in).bfloat16()
    expected = module(rows)
    for num in range(4 if kind is OneDnnLinear else 1, 64):
        assert torch.equal(module(rows[:num]), expected[:num]), num


@torch.no_grad()
def test_a_bias_is_rounded_together_with_the_product_joined_or_not() -> None:
    torch.manual_seed(2)
    plain, joined = Attention(bias=True), Attention(bias=True)
    joined.load_state_dict(plain.state_dict())
    rows = torch.randn(2, 8, 64).bfloat16()
    expected = plain(rows)
    pack_linears(plain, joins=False)
    pack_linears(joined, joins=True)
    assert torch.equal(plain(rows), joined(rows))
    assert torch.allclose(plain(rows).float(), expected.float(), atol=0.02)


@torch.no_grad()
def test_layers_that_do_not_match_stay_apart(kind: type[PackedLinear]) -> None:
    module = Attention(bias=True, odd=True)
    rows = torch.randn(1, 4, 64).bfloat16()
    expected = module(rows)
    pack_linears(module, joins=True)
    assert isinstance(module.k_proj, kind)
    assert torch.allclose(module(rows).float(), expected.float(), atol=0.02)


@torch.no_grad()
def test_packed_weights_go_with_their_layers(kind: type[PackedLinear]) -> None:
    """Packed weights are freed with their model."""
    kept = kind(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    rows = torch.randn(4, 64).bfloat16()
    expected = kept(rows)
    weights = []
    for _ in range(3):
        module = Attention(bias=False)
        pack_linears(module, joins=True)
        weights += [weakref.ref(part._weight) for part in module.modules() if isinstance(part, kind)]
        del module
    gc.collect()
    assert len(weights) == 6
    assert not any(weight() is not None for weight in weights)
    assert torch.equal(kept(rows), expected)


def test_other_layers_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert pack_linears(module, joins=True) == ""
    assert type(module[0]) is nn.Linear


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (nn.Linear(4, 4, dtype=torch.bfloat16), True),
        (nn.Embedding(8, 4, dtype=torch.bfloat16), True),
        (nn.RMSNorm(4, dtype=torch.bfloat16), True),
        (nn.Linear(4, 4), False),
        (nn.ParameterList([torch.zeros(4, 4, dtype=torch.bfloat16)]), False),
        (nn.Conv1d(4, 4, 3, dtype=torch.bfloat16), False),
    ],
    ids=["linear", "embedding", "norm", "float32", "parameter", "convolution"],
)
def test_knows_whether_a_weight_is_left(other: nn.Module, expected: bool) -> None:
    module = nn.ModuleList([nn.Linear(4, 4, dtype=torch.bfloat16), other])
    assert not are_all_packed(module)
    pack_linears(module, joins=False)
    assert are_all_packed(module) == expected


def test_a_weight_that_is_an_embedding_too_is_packed_with_its_layer(kind: type[PackedLinear]) -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(8, 4, dtype=torch.bfloat16), "head": nn.Linear(4, 8, bias=False)})
    module["head"].weight = module["embed"].weight
    pack_linears(module, joins=False)
    assert isinstance(module["head"], kind)
    assert are_all_packed(module)


def test_what_cannot_be_packed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "packed_kind", lambda: None)
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    assert pack_linears(module, joins=True) == ""
    assert type(module[0]) is nn.Linear
