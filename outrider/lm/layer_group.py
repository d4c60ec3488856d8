"""A few layers of a model that are one compiled function, and the code that alike groups of them share."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from outrider.lm.compiled_code import CompiledCode, FlatCall, Layers

_MAX_VARIANTS: Final = 32


class LayerGroup:
    """Layers that are one function.

    Args:
        codes: that groups alike to this one share.
        layers: the layers, at least one.

    Attributes:
        layers: see there.
        called_with: the constants of the last call of the first layer, and where its tensors stand; see `FlatCall`.
    """

    def __init__(self, codes: "GroupCodes", layers: Layers) -> None:
        self.layers = layers
        self.called_with: tuple[tuple[Any, ...], pytree.TreeSpec] = FlatCall.of((), {})[1:]
        self._codes = codes
        self._inputs: dict[CompiledCode, list[torch.Tensor]] = {}
        self._outputs: list[Any] = []

    def attach(self) -> None:
        """Have the first layer's call run all of them; those of the others return what it found."""
        set_call(self.layers[0], self._first)
        for layer in self.layers[1:]:
            set_call(layer, self._next)

    def run(self, call: FlatCall) -> list[Any]:
        """Return the outputs of all layers, of which the first one is called like this."""
        code = self._codes.code(self.layers, call)
        inputs = self._inputs.get(code)
        if inputs is None:
            inputs = self._inputs[code] = code.inputs(self.layers)
        return code(inputs, call.tensors)

    @property
    def codes(self) -> Sequence[CompiledCode]:
        """The code that it shares with groups alike to it, one for each kind of call so far."""
        return self._codes.codes

    def _first(self, *arguments: Any, **keywords: Any) -> Any:
        call = self._codes.flat(arguments, keywords)
        self.called_with = (call.constants, call.spec)
        self._outputs = self.run(call)[::-1]
        return self._outputs.pop()

    def _next(self, *_: Any, **__: Any) -> Any:
        return self._outputs.pop()


class GroupCodes:
    """The compiled code of groups that are alike: one for each kind of call.

    Within a pass all groups are called with the same objects but for the hidden states, so that code is searched for
    once.

    Attributes:
        codes: those so far.
    """

    def __init__(self) -> None:
        self.codes: list[CompiledCode] = []
        self._last: tuple[FlatCall, CompiledCode] | None = None
        self._last_flat: tuple[list[Any], FlatCall] | None = None

    def flat(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> FlatCall:
        """Return the arguments of a call as one."""
        if not arguments or not isinstance(arguments[0], torch.Tensor):
            return FlatCall.of(arguments, keywords)
        others = [*arguments[1:], *keywords, *keywords.values()]
        if self._last_flat is None or not _are_same(others, self._last_flat[0]):
            self._last_flat = (others, FlatCall.of(arguments, keywords))
        call = self._last_flat[1]
        return call._replace(tensors=(arguments[0], *call.tensors[1:]))

    def code(self, layers: Layers, call: FlatCall) -> CompiledCode:
        """Return the code for a call, which is compiled if there is none."""
        if self._last is not None and _is_like(call, self._last[0]):
            return self._last[1]
        code = next((code for code in self.codes if code.fits(layers, call)), None)
        if code is None:
            if len(self.codes) == _MAX_VARIANTS:
                raise RuntimeError(f"the layers were called in more than {_MAX_VARIANTS} ways")
            code = CompiledCode(layers, call)
            self.codes.append(code)
        self._last = (call, code)
        return code


def set_call(layer: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace a layer's call; None restores its own."""
    # As `nn.Module.compile` does, but with code that all layers share.
    layer._compiled_call_impl = call


def _is_like(call: FlatCall, last: FlatCall) -> bool:
    if call.constants is not last.constants or call.spec is not last.spec:
        return False
    hidden, before = call.tensors[0], last.tensors[0]
    is_alike = hidden.shape == before.shape and hidden.dtype == before.dtype
    return is_alike and _are_same(call.tensors[1:], last.tensors[1:])


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))
