"""The compiled code of a few layers that are one function, for one kind of call.

The layers are exported as a graph with all tensors as inputs, and the compiler makes one function of it: weights, the
other tensors that the layers hold, and those of the call. So groups of layers that are alike share the code, and a call
passes a list of tensors: no module is looked into and no guard is checked. Code that was made once is found on disk by
what it was made from (see `code_key`): a later start neither exports the layers nor compiles them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from outrider.lm.code_key import code_key
from outrider.lm.code_store import load_code, save_code
from outrider.lm.compiled_function import Run, compile_function

Layers: TypeAlias = tuple[nn.Module, ...]

_TENSOR: Final = object()
"""Stands for a tensor among the constants of a call."""


class FlatCall(NamedTuple):
    """The arguments of a call of the first layer.

    Attributes:
        tensors: all of them, the hidden states first where they are the first argument.
        constants: whatever else there is, which is part of the code.
        spec: where each of them stands.
    """

    tensors: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def places(self) -> list[Any]:
        """The constants, and names in place of tensors."""
        return ["a tensor" if constant is _TENSOR else constant for constant in self.constants]

    @classmethod
    def of(cls, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> "FlatCall":
        """Return the call with these arguments."""
        leaves, spec = pytree.tree_flatten((arguments, keywords))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return cls(tensors, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of its own."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self.constants]
        arguments, keywords = pytree.tree_unflatten(leaves, self.spec)
        return arguments, keywords


class CompiledCode:
    """Compiled code; see the module. Bits depend on the number of threads with which it was compiled.

    Args:
        layers: that follow each other; those of other groups that it runs are alike.
        call: an example. Sizes of 1 become constants of the code, and so do sizes that the layers fix.

    Attributes:
        is_kept: whether it was found on disk, or has been written there.

    Raises:
        RuntimeError: they cannot be compiled.
    """

    def __init__(self, layers: Layers, call: FlatCall) -> None:
        self._num_threads = torch.get_num_threads()
        self._constants, self._spec = call.constants, call.spec
        self._fitting = {layers: True}
        tensors = (*_held_tensors(layers), *call.tensors)
        self._key = code_key(layers, (call.places, str(call.spec)), tensors)
        kept = None if self._key is None else load_code(self._key)
        self.is_kept = kept is not None
        self._run: Run
        if kept is not None:
            (self._run,), signature = kept[0], _Signature.from_facts(kept[1])
        else:
            try:
                self._run, signature = _compiled(_Function(layers, call), tensors)
            except Exception as error:
                raise RuntimeError(f"the layers cannot be compiled: {error}") from error
        self._names, self._kinds, self._output_spec = signature
        self._has_flat_outputs = all(layer.is_leaf() for layer in self._output_spec.children())

    def save(self) -> None:
        """Keep it for later starts, unless it is kept or no key stands for it."""
        facts = _Signature(self._names, self._kinds, self._output_spec).to_facts()
        if not self.is_kept and self._key is not None and facts is not None:
            save_code(self._key, [self._run], facts)
            self.is_kept = True

    def fits(self, layers: Layers, call: FlatCall) -> bool:
        """Return whether it runs such a call of layers alike to its own."""
        if (self._num_threads, self._constants, self._spec) != (torch.get_num_threads(), call.constants, call.spec):
            return False
        num_held = len(self._kinds) - len(call.tensors)
        if not all(map(_Kind.fits, self._kinds[num_held:], call.tensors)):
            return False
        # What layers hold stays the same, and so is looked at once: a walk through modules takes half a millisecond.
        if layers not in self._fitting:
            held = _held_tensors(layers)
            self._fitting[layers] = len(held) == num_held and all(map(_Kind.fits, self._kinds, held))
        return self._fitting[layers]

    def inputs(self, layers: Layers) -> list[Tensor]:
        """Return the tensors that layers hold, which precede those of a call: weights, buffers and attributes."""
        return [*_weights(_Function(layers, None), self._names), *_held_tensors(layers)]

    def __call__(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Any]:
        """Return the outputs of all layers.

        Args:
            inputs: of the layers; see `inputs`.
            tensors: of the call.
        """
        outputs = list(self._run(*inputs, *tensors))
        if self._has_flat_outputs:
            return outputs
        made: list[Any] = pytree.tree_unflatten(outputs, self._output_spec)
        return made


class _Kind(NamedTuple):
    """The tensors for which code was compiled, and their fixed sizes by dimension."""

    dtype: torch.dtype
    num_dims: int
    sizes: tuple[tuple[int, int], ...]

    def fits(self, tensor: Tensor) -> bool:
        shape = tensor.shape
        is_alike = tensor.dtype == self.dtype and len(shape) == self.num_dims
        return is_alike and all(shape[dim] == size for dim, size in self.sizes)


class _Signature(NamedTuple):
    """The names of the weights that code takes, the tensors that it takes after them, and where its outputs belong."""

    names: list[str]
    kinds: list[_Kind]
    outputs: pytree.TreeSpec

    def to_facts(self) -> dict[str, Any] | None:
        """Return it for JSON; None where an output has a type of its own."""
        kinds = [(str(kind.dtype).removeprefix("torch."), kind.num_dims, kind.sizes) for kind in self.kinds]
        try:
            return {"names": self.names, "kinds": kinds, "outputs": pytree.treespec_dumps(self.outputs)}
        except (NotImplementedError, TypeError):
            return None

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "_Signature":
        """Return it from what `to_facts` made."""
        kinds = [
            _Kind(getattr(torch, dtype), num_dims, tuple((dim, size) for dim, size in sizes))
            for dtype, num_dims, sizes in facts["kinds"]
        ]
        return cls(facts["names"], kinds, pytree.treespec_loads(facts["outputs"]))


def _compiled(function: "_Function", tensors: Sequence[Tensor]) -> tuple[Run, _Signature]:
    sizes = tuple(_sizes(tensor) for tensor in tensors)
    exported = torch.export.export(function, tuple(tensors), dynamic_shapes=(sizes,), strict=False)
    nodes = exported.graph.find_nodes(op="placeholder")
    weights = list(zip(nodes, exported.graph_signature.input_specs, strict=True))[: len(nodes) - len(tensors)]
    if any(item.target in exported.constants for _, item in weights):
        raise RuntimeError("they make tensors of their own")
    # A weight that several layers share is an input for each of them, of which one is used.
    names = [str(item.target) for node, item in weights if node.users]
    for node, _ in weights:
        if not node.users:
            exported.graph.erase_node(node)
    exported.graph_module.recompile()
    inputs = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")]
    run = compile_function(exported.graph_module, inputs, (*_weights(function, names), *tensors))
    return run, _Signature(names, [_kind(example) for example in inputs[len(names) :]], exported.call_spec.out_spec)


def _weights(function: "_Function", names: Sequence[str]) -> list[Tensor]:
    named: dict[str, Tensor] = dict(function.named_buffers(remove_duplicate=False))
    named.update(function.named_parameters(remove_duplicate=False))
    return [named[name].detach() for name in names]


def _sizes(example: Tensor) -> list[Any]:
    """Return by dimension whether the compiler may take its size as a symbol."""
    return [Dim.STATIC if size == 1 else Dim.AUTO for size in example.shape]


def _kind(example: Tensor) -> _Kind:
    sizes = tuple((dim, size) for dim, size in enumerate(example.shape) if isinstance(size, int))
    return _Kind(example.dtype, example.dim(), sizes)


class _Function(nn.Module):
    """Layers that follow each other, as a function of the tensors that they hold and those of a call."""

    def __init__(self, layers: Layers, call: FlatCall | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._call = call
        self._places = held_places(layers)

    def forward(self, *tensors: Tensor) -> list[Any]:
        """Return the outputs of all layers."""
        assert self._call is not None
        arguments, keywords = self._call.arguments(tensors[len(self._places) :])
        layers = list(self.layers)
        with _replaced(self._places, tensors):
            outputs = [layers[0].forward(*arguments, **keywords)]
            for layer in layers[1:]:
                outputs.append(layer.forward(outputs[-1], *arguments[1:], **keywords))
        return outputs


def held_places(layers: Layers) -> list[tuple[nn.Module, str]]:
    """Return the modules and attributes with tensors that are neither parameters nor buffers: keys and values."""
    modules = [module for layer in layers for module in layer.modules()]
    return [(module, name) for module in modules for name, value in vars(module).items() if isinstance(value, Tensor)]


def _held_tensors(layers: Layers) -> list[Tensor]:
    return [vars(module)[name] for module, name in held_places(layers)]


@contextmanager
def _replaced(places: Sequence[tuple[nn.Module, str]], tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [vars(module)[name] for module, name in places]
    try:
        for (module, name), tensor in zip(places, tensors, strict=False):
            setattr(module, name, tensor)
        yield
    finally:
        for (module, name), tensor in zip(places, before, strict=True):
            setattr(module, name, tensor)
