"""Compilation of a model's layers: one code for all groups of them and all numbers of rows, cached on disk."""

import functools
import itertools
import logging
import os
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from outrider.cache import cache_dir

_LOG: Final = logging.getLogger(__name__)
_MAX_VARIANTS: Final = 32
_MIN_CHUNK: Final = 16384
_MAX_TOGETHER: Final = 5
"""Layers that are one function: more of them take longer to compile, and the way into them is short already."""
_CODE: Final = 7
"""Version of this module in the cache folder's name; increased by changes that the compiler's cache key lacks."""

Layers: TypeAlias = tuple[nn.Module, ...]

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
    with suppress(Exception):
        from torch._inductor import cpp_builder

        cpp_builder.get_cpp_compiler()
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
    code and back takes 80 us, for each of the embedded model's layers a seventh of a pass.

    The groups share their code and differ in weights only, so that the first one is compiled for all, with symbolic
    numbers of rows. Weights are not copied.

    Compiled code checks its guards before each call. If all groups are alike, only arguments and sizes can change, and
    these are alike within a pass: only the first group checks them (`_OneCode`).

    Args:
        layers: of one model.
        size: of a group; see `num_together`.
    """
    _use_disk_cache()
    # The compiler stores its results with the code object; each model needs one of its own.
    run = types.FunctionType(_run_layers.__code__.replace(), _run_layers.__globals__)
    groups = _groups(layers, size)
    are_alike = _are_alike([nn.ModuleList(group) for group in groups])
    options: dict[str, Any] = {"guard_filter_fn": _check_arguments} if are_alike else {}
    compiled: Callable[..., Any] = torch.compile(run, fullgraph=True, dynamic=True, options=options)
    if are_alike and hasattr(compiled, "aot_compile"):
        compiled = _OneCode(compiled, groups[0])
    for group in groups:
        made = _Group(compiled, group)
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
        compiled: runs them.
        layers: the layers, at least one.
    """

    def __init__(self, compiled: Callable[..., Any], layers: Layers) -> None:
        self._compiled = compiled
        self._layers = layers
        self._outputs: list[Any] = []

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        """Run all layers; return the output of the first one."""
        self._outputs = self._compiled(self._layers, *arguments, **keywords)[::-1]
        return self._outputs.pop()

    def next(self, *_: Any, **__: Any) -> Any:
        """Return the output of the next layer."""
        return self._outputs.pop()


class _OneCode:
    """The compiled code of groups that are alike, which is chosen once for a pass.

    `torch.compile` finds the code for each call: with the checks of its guards 90 us for each layer of the embedded
    model. Here the first group's call chooses it, and compiles it where there is none that fits.

    Args:
        compiled: what `torch.compile` returns.
        first: the group with which each pass begins.
    """

    def __init__(self, compiled: Any, first: Layers) -> None:
        self._compiled = compiled
        self._first = first
        self._codes: list[Any] = []
        self._run: Callable[..., Any] = compiled

    def __call__(self, layers: Layers, *arguments: Any, **keywords: Any) -> Any:
        if layers is self._first:
            self._run = self._chosen(layers, *arguments, **keywords)
        return self._run(layers, *arguments, **keywords)

    def _chosen(self, *arguments: Any, **keywords: Any) -> Callable[..., Any]:
        code = next((code for code in self._codes if code.guard_check(*arguments, **keywords)), None)
        if code is None:
            if len(self._codes) == _MAX_VARIANTS:
                return cast("Callable[..., Any]", self._compiled)
            code = self._compiled.aot_compile((arguments, keywords))
            self._codes.append(code)
        return cast("Callable[..., Any]", code.fn)


def _run_layers(layers: Layers, *arguments: Any, **keywords: Any) -> list[Any]:
    outputs = [layers[0].forward(*arguments, **keywords)]
    for layer in layers[1:]:
        outputs.append(layer.forward(outputs[-1], *arguments[1:], **keywords))
    return outputs


def _groups(layers: Sequence[nn.Module], size: int) -> list[Layers]:
    return [tuple(layers[first : first + size]) for first in range(0, len(layers), size)]


def _check_arguments(checks: Sequence[Any]) -> list[bool]:
    """Return which guards are kept: tensors, their sizes, and global state such as the number of threads."""
    kept = ("GLOBAL_STATE", "SHAPE_ENV")
    return [
        check.guard_type in kept or (check.guard_type == "TENSOR_MATCH" and not check.is_global) for check in checks
    ]


def _set_call(layer: nn.Module, call: Callable[..., Any] | None) -> None:
    # As `nn.Module.compile` does, but with code that all layers share.
    layer._compiled_call_impl = call


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether the layers differ in their weights and layer numbers only."""
    kinds = [[(name, type(module), _constants(module)) for name, module in layer.named_modules()] for layer in layers]
    return all(kind == kinds[0] for kind in kinds)


def _constants(module: nn.Module) -> dict[str, object]:
    """Return the constants of a module that compiled code may depend on."""
    constants = (int, float, str, bool, type(None), tuple)
    return {key: value for key, value in vars(module).items() if isinstance(value, constants) and key != "layer_idx"}


def _use_disk_cache() -> None:
    import torch._dynamo.config
    import torch._inductor.config

    # Compiled loops contain the number of threads.
    folder = cache_dir() / "compiled" / f"torch-{torch.__version__}-threads-{torch.get_num_threads()}-{_CODE}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_made(folder))
    # A few kernels do not need a pool of compiler processes, which would keep running.
    torch._inductor.config.compile_threads = 1
    # What lies between kernels and operators is C++ too: a layer is one call from Python in place of a dozen, each of
    # which gives up the interpreter's lock and may wait for the event loop before it has it again.
    torch._inductor.config.cpp_wrapper = True
    # Kinds of layers (with and without a sliding window) are variants of one code.
    torch._dynamo.config.recompile_limit = _MAX_VARIANTS
    torch._inductor.config.post_grad_custom_pre_pass = _MergeEqualProducts()
    # A loop over a few rows finishes before a second thread has started.
    torch._inductor.config.cpp.min_chunk_size = _MIN_CHUNK
    # The scale and the bound of scores are constants of the model, not symbols.
    torch._dynamo.config.specialize_float = True


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
