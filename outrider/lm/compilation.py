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
from outrider.lm.compiled_code import Layers
from outrider.lm.layer_group import GroupCodes, LayerGroup, set_call
from outrider.native.build import find_compiler

_LOG: Final = logging.getLogger(__name__)
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
        set_call(layer, functools.partial(recorded, layer))
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


def compile_layers(layers: Sequence[nn.Module], size: int = 1) -> list[LayerGroup]:
    """Replace the layers' calls by compiled code, which is compiled at the first pass.

    Of each group the first layer's call runs all of them, and the others return what it found: the way into compiled
    code and back takes time (see `compiled_code`). Groups that are alike share their code, with symbolic numbers of
    rows. Weights are not copied.

    Args:
        layers: of one model.
        size: of a group; see `num_together`.

    Returns:
        The groups, in order.
    """
    _use_disk_cache()
    groups = []
    kinds: list[tuple[object, GroupCodes]] = []
    for group in _groups(layers, size):
        kind = _kind(nn.ModuleList(group))
        codes = next((codes for known, codes in kinds if known == kind), None)
        if codes is None:
            codes = GroupCodes()
            kinds.append((kind, codes))
        groups.append(LayerGroup(codes, group))
        groups[-1].attach()
    return groups


def uncompile_layers(layers: Sequence[nn.Module]) -> None:
    """Restore the uncompiled calls of the layers."""
    for layer in layers:
        set_call(layer, None)


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


def _groups(layers: Sequence[nn.Module], size: int) -> list[Layers]:
    return [tuple(layers[first : first + size]) for first in range(0, len(layers), size)]


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
