"""Compilation of a model's layers: one code for all groups of them and all numbers of rows, cached on disk."""

import functools
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from outrider.cache import cache_dir
from outrider.lm.compiled_code import CompiledCode, FlatCall, Layers
from outrider.native.build import find_compiler

_LOG: Final = logging.getLogger(__name__)
_MAX_VARIANTS: Final = 32
_MIN_CHUNK: Final = 16384
_MAX_TOGETHER: Final = 5
"""Layers that are one function: more of them take longer to compile, and the way into them is short already."""
_CODE: Final = 9
"""Version of this module in the cache folder's name; increased by changes that the compiler's cache key lacks."""

_PRODUCTS: Final = ("outrider.packed_product.default", "outrider.packed_linear.default")


class _MergeEqualProducts(CustomGraphPass):
    """A graph pass that merges equal products of packed weights, which the compiler does not recognise as equal."""

    def __call__(self, graph: fx.Graph) -> None:
        """Merge equal calls in place."""
        kept: dict[tuple[object, ...], fx.Node] = {}
        for node in list(graph.nodes):
            if str(node.target) not in _PRODUCTS:
                continue
            same = kept.setdefault((node.target, node.args), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)

    def uuid(self) -> str:
        """Return the identity of this pass for the key of the compiler's disk cache."""
        return "outrider-one-product-each-2"


def find_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """Return the model's decoder layers: the first module list of this length; empty if there is none."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((list(layers) for layers in lists if len(layers) == num_layers), [])


def can_compile(device: torch.device) -> bool:
    """Return whether layers can be compiled for this device; log a warning if there is no C++ compiler."""
    if device.type != "cpu":
        return False
    if find_compiler() is not None:
        return True
    _LOG.warning("no C++ compiler found: the model runs uncompiled, at half the speed")
    return False


def num_together(layers: Sequence[nn.Module], run: Callable[[], object]) -> int:
    """Return how many layers at a time can be one function: they follow each other directly, in all groups alike.

    Args:
        layers: uncompiled.
        run: runs a pass.
    """
    calls: list[_Call] = []

    def recorded(layer: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        output = layer._call_impl(*arguments, **keywords)  # type: ignore[no-untyped-call]
        calls.append(_Call(layer, arguments, keywords, output))
        return output

    for layer in layers:
        _set_call(layer, functools.partial(recorded, layer))
    try:
        run()
    finally:
        uncompile_layers(layers)
    del calls[len(layers) :]
    if [call.layer for call in calls] != list(layers):
        return 1
    follow = [now.follows(before) for before, now in itertools.pairwise(calls)]

    def fits(size: int) -> bool:
        groups = _groups(layers, size)
        inner = (follow[place - 1] for place in range(1, len(layers)) if place % size)
        return len(layers) % size == 0 and all(inner) and _are_alike([nn.ModuleList(group) for group in groups])

    return next((size for size in range(_MAX_TOGETHER, 1, -1) if fits(size)), 1)


def compile_layers(layers: Sequence[nn.Module], size: int = 1) -> None:
    """Replace the layers' calls by compiled code, which is compiled at the first pass.

    Of each group the first layer's call runs all of them, and the others return what it found: the way into compiled
    code and back takes time (see `compiled_code`). Groups that are alike share their code, with symbolic numbers of
    rows. Weights are not copied.

    Args:
        layers: of one model.
        size: of a group; see `num_together`.
    """
    _use_disk_cache()
    groups = _groups(layers, size)
    kinds: list[tuple[object, _Codes]] = []
    for group in groups:
        kind = _kind(nn.ModuleList(group))
        codes = next((codes for known, codes in kinds if known == kind), None)
        if codes is None:
            codes = _Codes()
            kinds.append((kind, codes))
        made = _Group(codes, group)
        _set_call(group[0], made.run)
        for layer in group[1:]:
            _set_call(layer, made.next)


def uncompile_layers(layers: Sequence[nn.Module]) -> None:
    """Restore the uncompiled calls of the layers."""
    for layer in layers:
        _set_call(layer, None)


class _Call(NamedTuple):
    """A layer's call."""

    layer: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any

    def follows(self, before: "_Call") -> bool:
        """Whether its input is the output of the call before, and whatever else it is given the same."""
        if (
            not self.arguments
            or not isinstance(before.output, torch.Tensor)
            or self.keywords.keys() != before.keywords.keys()
        ):
            return False
        ours, theirs = ((*call.arguments[1:], *call.keywords.values()) for call in (self, before))
        is_same = len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))
        return self.arguments[0] is before.output and is_same


class _Group:
    """The calls of layers that are one function.

    Args:
        codes: that groups alike to this one share.
        layers: the layers, at least one.
    """

    def __init__(self, codes: "_Codes", layers: Layers) -> None:
        self._codes = codes
        self._layers = layers
        self._inputs: dict[CompiledCode, list[torch.Tensor]] = {}
        self._outputs: list[Any] = []

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        """Run all layers; return the output of the first one."""
        code, tensors = self._codes.chosen(self._layers, arguments, keywords)
        inputs = self._inputs.get(code)
        if inputs is None:
            inputs = self._inputs[code] = code.inputs(self._layers)
        self._outputs = code(inputs, tensors)[::-1]
        return self._outputs.pop()

    def next(self, *_: Any, **__: Any) -> Any:
        """Return the output of the next layer."""
        return self._outputs.pop()


class _Codes:
    """The compiled code of groups that are alike: one for each kind of call."""

    def __init__(self) -> None:
        self._codes: list[CompiledCode] = []
        self._last: tuple[CompiledCode, list[Any], Sequence[torch.Tensor]] | None = None

    def chosen(
        self, layers: Layers, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[CompiledCode, Sequence[torch.Tensor]]:
        """Return the code for a call, which is compiled if there is none, and the tensors of the call."""
        # Within a pass all groups are called with the same objects but for the hidden states.
        others, last = [*arguments[1:], *keywords, *keywords.values()], self._last
        hidden = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        if last is not None and hidden is not None and _are_same(others, last[1]) and _is_like(hidden, last[2][0]):
            return last[0], (hidden, *last[2][1:])
        call = FlatCall.of(arguments, keywords)
        code = next((code for code in self._codes if code.fits(layers, call)), None)
        if code is None:
            if len(self._codes) == _MAX_VARIANTS:
                raise RuntimeError(f"the layers were called in more than {_MAX_VARIANTS} ways")
            code = CompiledCode(layers, call)
            self._codes.append(code)
        self._last = None if hidden is None else (code, others, call.tensors)
        return code, call.tensors


def _is_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))


def _groups(layers: Sequence[nn.Module], size: int) -> list[Layers]:
    return [tuple(layers[first : first + size]) for first in range(0, len(layers), size)]


def _set_call(layer: nn.Module, call: Callable[..., Any] | None) -> None:
    # As `nn.Module.compile` does, but with code that all layers share.
    layer._compiled_call_impl = call


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether the layers differ in their weights and layer numbers only."""
    kinds = [_kind(layer) for layer in layers]
    return all(kind == kinds[0] for kind in kinds)


def _kind(layer: nn.Module) -> object:
    """Return what compiled code may depend on, which alike layers have in common."""
    weights = [
        (name, tensor.shape, tensor.dtype) for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
    ]
    return [(name, type(module), _constants(module)) for name, module in layer.named_modules()], weights


def _constants(module: nn.Module) -> dict[str, object]:
    """Return the constants of a module that compiled code may depend on."""
    constants = (int, float, str, bool, type(None), tuple)
    return {key: value for key, value in vars(module).items() if isinstance(value, constants) and key != "layer_idx"}


def _use_disk_cache() -> None:
    import torch._inductor.config

    # Compiled loops contain the number of threads.
    folder = cache_dir() / "compiled" / f"torch-{torch.__version__}-threads-{torch.get_num_threads()}-{_CODE}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_made(folder))
    # A few kernels do not need a pool of compiler processes, which would keep running.
    torch._inductor.config.compile_threads = 1
    # What lies between kernels and operators is C++ too: a layer is one call from Python in place of a dozen, each of
    # which gives up the interpreter's lock and may wait for the event loop before it has it again.
    torch._inductor.config.cpp_wrapper = True
    torch._inductor.config.post_grad_custom_pre_pass = _MergeEqualProducts()
    # A loop over a few rows finishes before a second thread has started.
    torch._inductor.config.cpp.min_chunk_size = _MIN_CHUNK


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
