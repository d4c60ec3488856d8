"""bfloat16 linear layers for CPUs, with weights stored in oneDNN's block layout.

`nn.Linear` stores its weights row by row and reorders them on every call. With weights that are reordered once, a call
reads about 1.5 times as many bytes per second (2 cores, 4 rows: 38 against 26 GB/s for a 1536 x 576 layer) and has the
same bits.
"""

import itertools
import weakref
from typing import Final

import torch
from torch import nn

ROW_BLOCK: Final = 6
"""Rows per block of oneDNN's bfloat16 kernel with AVX-512: 4 to 6 rows cost the same, 7 take 1.3 times as long.

Measured on one core, a 16,384 x 2,048 layer: 3.0 ms for 4, 5 and 6 rows, 3.9 for 7, 4.2 for 8, 4.9 for 12, 6.0 for 16.
"""
_ROWS_HINT: Final = 8
_SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers' models apply to the same input."""

# A packed weight is opaque to torch.compile, which can neither trace nor copy it. So the operator takes its number as a
# tensor: an int would be a constant of the compiled code, and every layer would be compiled separately. The layer owns
# the weight, which is freed with the layer.
_weights: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count()
_library = torch.library.Library("outrider", "DEF")  # type: ignore[no-untyped-call]
_SIGNATURE: Final = "packed_linear(Tensor rows, Tensor weight, Tensor? bias, int out_features) -> Tensor"
_library.define(_SIGNATURE)  # type: ignore[no-untyped-call]


def _run(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    number = int(weight.item())
    # By its overload: resolving the overload takes as long as a small product.
    linear = torch.ops.mkldnn._linear_pointwise.default
    output: torch.Tensor = linear(rows, _weights[number], bias, "none", [], "")
    return output


def _shape(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], out_features)


_library.impl("packed_linear", _run, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("outrider::packed_linear", _shape, lib=_library)


_packed_linear: Final = torch.ops.outrider.packed_linear.default


class PackedLinear(nn.Module):
    """One or several bfloat16 linear layers with the same input, packed as one layer in oneDNN's layout, for CPUs.

    Without a bias the bits are those of `nn.Linear`; a bias is added before the product is rounded to bfloat16.

    Args:
        linears: layers with the same number of inputs, all with a bias or none with a bias; usually one.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.out_features = sum(linear.out_features for linear in linears)
        number = next(_numbers)
        self._number = torch.tensor(number)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        _weights[number] = self._weight
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs, bfloat16 [..., out_features], of rows, bfloat16 [..., in_features]."""
        output: torch.Tensor = _packed_linear(rows, self._number, self._bias, self.out_features)
        return output


class PackedPart(nn.Module):
    """One of several layers that are packed as one.

    Each part computes the whole product and selects its columns; compiled code merges the equal products (see
    `compilation`).
    """

    def __init__(self, whole: PackedLinear, first: int, out_features: int) -> None:
        super().__init__()
        self._whole = whole
        self._first = first
        self._last = first + out_features

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this part's outputs, bfloat16 [..., out_features], of rows, bfloat16 [..., in_features]."""
        whole: torch.Tensor = self._whole(rows)
        return whole[..., self._first : self._last]


def is_supported() -> bool:
    """Return whether this build of PyTorch can pack bfloat16 weights on this CPU."""
    # The second condition is also False if PyTorch was built without oneDNN.
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module, *, joins: bool) -> int:
    """Replace every bfloat16 `nn.Linear` (exactly that class) on the CPU by its packed form; return their number.

    Args:
        model: changed in place.
        joins: whether layers that are known to have the same input become one, which only helps compiled layers.
    """
    if not is_supported():
        return 0
    parents = [(parent, _linears(parent)) for parent in model.modules()]
    for parent, linears in parents:
        for names in _SIBLINGS if joins else ():
            if len(siblings := [linears[name] for name in names if name in linears]) == len(names):
                _join(parent, names, siblings)
        for name, linear in linears.items():
            if getattr(parent, name) is linear:
                setattr(parent, name, PackedLinear(linear))
    return sum(len(linears) for _, linears in parents)


def are_all_packed(model: nn.Module) -> bool:
    """Return whether all weights that rows are multiplied with are packed.

    Every other parameter or buffer of at least two dimensions, except embeddings, counts as such a weight: float32 and
    quantised layers, and routers of mixtures of experts.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = [weight for weight in (*model.parameters(), *model.buffers()) if weight.ndim > 1]
    has_packed = any(isinstance(module, PackedLinear) for module in model.modules())
    return has_packed and all(id(weight) in embeddings for weight in weights)


def _linears(parent: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: child
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu"
    }


def _join(parent: nn.Module, names: tuple[str, ...], linears: list[nn.Linear]) -> None:
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return
    whole = PackedLinear(*linears)
    first = 0
    for name, linear in zip(names, linears, strict=True):
        setattr(parent, name, PackedPart(whole, first, linear.out_features))
        first += linear.out_features
