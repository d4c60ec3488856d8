"""bfloat16 linear layers for CPUs, with weights that are laid out once for the kernel that reads them.

The kernel is the native product (`outrider.native`) where that can be had, else oneDNN's.
"""

import itertools
import os
import weakref
from typing import Final, TypeAlias

import torch
from torch import nn

from outrider import native

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


class NativeLinear(nn.Module):
    """One or several bfloat16 linear layers with the same input, as one layer that runs the native product.

    A bias is added before the product is rounded to bfloat16.

    Args:
        linears: layers with the same number of inputs, all with a bias or none with a bias; usually one.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.out_features = sum(linear.out_features for linear in linears)
        # A parameter: the compiler takes its sizes as constants. As symbols they could be those of numbers of rows too.
        packed = native.pack(torch.cat([linear.weight.detach() for linear in linears]))
        self._weight = nn.Parameter(packed, requires_grad=False)
        self._bias = _joined_bias(linears)
        self._variant = _variant()

    @staticmethod
    def kind() -> str:
        """Return the name of the layers' bits, which is part of `numerics`: AMX has its own."""
        return "amx" if native.best_variant() is native.Variant.AMX else "native"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs, bfloat16 [..., out_features], of rows, bfloat16 [..., in_features]."""
        product = torch.ops.outrider.packed_product.default
        output: torch.Tensor = product(rows, self._weight, self._bias, self.out_features, self._variant)
        return output


class ByteLinear(nn.Module):
    """As `NativeLinear`, with weights and rows that are rounded to 8 bits: for drafts, which need not be exact.

    Attributes:
        tensors: the packed weight, its scales, and the bias where there is one.
        variant: of the native operators.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.out_features = sum(linear.out_features for linear in linears)
        bias = _joined_bias(linears)
        packed = native.pack_bytes(torch.cat([linear.weight.detach() for linear in linears]))
        self.tensors = [*packed, *(() if bias is None else (bias,))]
        self.variant = _variant()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs, bfloat16 [..., out_features], of rows, bfloat16 [..., in_features]."""
        product = torch.ops.outrider.byte_product.default
        output: torch.Tensor = product(rows, self.tensors, self.out_features, self.variant)
        return output


class OneDnnLinear(nn.Module):
    """As `NativeLinear`, in oneDNN's block layout.

    `nn.Linear` reorders its weights on every call. With weights that are reordered once, a call reads about 1.5 times
    as many bytes per second (2 cores, 4 rows: 38 against 26 GB/s for a 1536 x 576 layer). Without a bias the bits are
    those of `nn.Linear`.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.out_features = sum(linear.out_features for linear in linears)
        number = next(_numbers)
        self._number = torch.tensor(number)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        _weights[number] = self._weight
        self._bias = _joined_bias(linears)

    @staticmethod
    def kind() -> str:
        """Return the name of the layers' bits."""
        return "packed"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs, bfloat16 [..., out_features], of rows, bfloat16 [..., in_features]."""
        output: torch.Tensor = torch.ops.outrider.packed_linear.default(
            rows, self._number, self._bias, self.out_features
        )
        return output


PackedLinear: TypeAlias = NativeLinear | OneDnnLinear


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


def packed_kind() -> type[PackedLinear] | None:
    """Return the kind of packed layer that bfloat16 layers become on this CPU; None if they cannot be packed."""
    if native.best_variant() is not None:
        return NativeLinear
    # oneDNN's products by AMX add up in another order from 33 rows on. It reads this once, when it is first asked.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    # The second condition is also False if PyTorch was built without oneDNN.
    supported = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return OneDnnLinear if supported else None


def pack_linears(model: nn.Module, *, joins: bool) -> str:
    """Replace every bfloat16 `nn.Linear` (exactly that class) on the CPU by its packed form.

    Args:
        model: changed in place.
        joins: whether layers that are known to have the same input become one, which only helps compiled layers.

    Returns:
        The kind of the packed layers (see their `kind`); empty if there are none.
    """
    # Without the layers themselves, so that each one's weights are freed once it is packed.
    parents = [parent for parent in model.modules() if _linears(parent)]
    kind = packed_kind() if parents else None
    if kind is None:
        return ""
    for parent in parents:
        linears = _linears(parent)
        for names in _SIBLINGS if joins else ():
            if len(siblings := [linears[name] for name in names if name in linears]) == len(names):
                _join(kind, parent, names, siblings)
        for name, linear in linears.items():
            if getattr(parent, name) is linear:
                setattr(parent, name, kind(linear))
    return kind.kind()


def are_all_packed(model: nn.Module) -> bool:
    """Return whether all weights that rows are multiplied with are packed.

    Every other parameter or buffer of at least two dimensions, except embeddings, counts as such a weight: float32 and
    quantised layers, and routers of mixtures of experts.
    """
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    known = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    known |= {id(weight) for module in packed for weight in module.parameters()}
    weights = [weight for weight in (*model.parameters(), *model.buffers()) if weight.ndim > 1]
    return bool(packed) and all(id(weight) in known for weight in weights)


def _variant() -> int:
    variant = native.best_variant()
    if variant is None:
        raise RuntimeError("no native operators here: `packed_kind` says so")
    return int(variant)


def _linears(parent: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: child
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu"
    }


def _join(kind: type[PackedLinear], parent: nn.Module, names: tuple[str, ...], linears: list[nn.Linear]) -> None:
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return
    whole = kind(*linears)
    first = 0
    for name, linear in zip(names, linears, strict=True):
        setattr(parent, name, PackedPart(whole, first, linear.out_features))
        first += linear.out_features


def _joined_bias(linears: tuple[nn.Linear, ...]) -> torch.Tensor | None:
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None
