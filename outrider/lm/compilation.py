"""Compiling a model's layers: once for all layers and all numbers of rows, kept on disk between starts."""

import functools
import logging
import os
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from outrider.lm.embedded import cache_dir

_LOG: Final = logging.getLogger(__name__)
_MAX_VARIANTS: Final = 32
_MIN_CHUNK: Final = 16384
_CODE: Final = 3
"""Counts changes here that the compiler's own cache does not see; each begins a folder of its own."""


_REARRANGED: Final = ("key_reorder_ptr", "value_reorder_ptr")


class _OneProductEach(CustomGraphPass):
    """Keeps one of the equal calls of `packed_linear` in a graph, which the compiler takes for different ones."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        kept: dict[tuple[object, ...], fx.Node] = {}
        for node in list(graph.nodes):
            if node.target is not torch.ops.outrider.packed_linear.default:
                continue
            same = kept.setdefault(node.args, node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)

    def uuid(self) -> str:
        """Names this pass among what compiled code on disk depends on."""
        return "outrider-one-product-each-1"


def find_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """Returns the model's decoder layers: the first list of modules that has as many. Empty where there is none."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((list(layers) for layers in lists if len(layers) == num_layers), [])


def can_compile(device: torch.device) -> bool:
    """Whether there is what compiling for this device takes; logs a line that says what is missing."""
    if device.type != "cpu":
        return False
    with suppress(Exception):
        from torch._inductor import cpp_builder

        cpp_builder.get_cpp_compiler()
        return True
    _LOG.warning("no C++ compiler was found: the model runs uncompiled, at about two thirds of the speed")
    return False


def compile_layers(layers: list[nn.Module]) -> None:
    """Has each layer compiled at its first pass.

    The layers share their code and differ in weights only, so the first one compiles for all, and numbers of rows
    are symbols in it. Weights stay where they are.

    Before each call compiled code checks what it took for granted. Where all layers are alike, only arguments and sizes
    can change, and the other checks, which take a tenth of a pass of a small model, are left out.
    """
    _use_disk_cache()
    # The compiler keeps what it made with the code object: one for each model, or another one's code would be taken.
    run = types.FunctionType(_run_layer.__code__.replace(), _run_layer.__globals__)
    options: dict[str, Any] = {"guard_filter_fn": _check_arguments} if _are_alike(layers) else {}
    compiled = torch.compile(run, fullgraph=True, dynamic=True, options=options)
    for layer in layers:
        _set_call(layer, functools.partial(compiled, layer))


def uncompile_layers(layers: list[nn.Module]) -> None:
    """Has the layers run as they are again."""
    for layer in layers:
        _set_call(layer, None)


def _run_layer(layer: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    return layer.forward(*arguments, **keywords)


def _check_arguments(checks: Sequence[Any]) -> list[bool]:
    """Returns which checks remain: of the tensors, their sizes, and settings such as the number of threads."""
    kept = ("GLOBAL_STATE", "SHAPE_ENV")
    return [
        check.guard_type in kept or (check.guard_type == "TENSOR_MATCH" and not check.is_global) for check in checks
    ]


def _set_call(layer: nn.Module, call: Callable[..., Any] | None) -> None:
    # What `nn.Module.compile` sets too, but for code that all layers share.
    layer._compiled_call_impl = call


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    """Returns whether the layers differ in their weights and numbers only."""
    kinds = [[(name, type(module), _constants(module)) for name, module in layer.named_modules()] for layer in layers]
    return all(kind == kinds[0] for kind in kinds)


def _constants(module: nn.Module) -> dict[str, object]:
    """Returns what a module's code may depend on besides weights."""
    constants = (int, float, str, bool, type(None), tuple)
    return {key: value for key, value in vars(module).items() if isinstance(value, constants) and key != "layer_idx"}


def _use_disk_cache() -> None:
    import torch._dynamo.config
    import torch._inductor.config

    # Compiled loops carry the number of threads.
    folder = cache_dir() / "compiled" / f"torch-{torch.__version__}-threads-{torch.get_num_threads()}-{_CODE}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_made(folder))
    # A few kernels do not need a pool of processes, which would stay.
    torch._inductor.config.compile_threads = 1
    # Kinds of layers (with a window, without) are variants of one code.
    torch._dynamo.config.recompile_limit = _MAX_VARIANTS
    torch._inductor.config.post_grad_custom_pre_pass = _OneProductEach()
    # A loop over a few rows is done before a second thread has woken up.
    torch._inductor.config.cpp.min_chunk_size = _MIN_CHUNK
    # A scale or a bound of scores is a number of the model, not a symbol.
    torch._dynamo.config.specialize_float = True
    _allocate_what_is_used()


def _allocate_what_is_used() -> None:
    """Has flex attention on CPUs take memory for rearranged keys and values only where it does rearrange them.

    PyTorch 2.13 takes as much as all pages have, on every call, and never touches it with float32 keys. Getting that
    much from the system and giving it back takes a sixth of a pass of a small model.
    """
    # By name, and this one first: without it the import of the other would be circular.
    import_module("torch._inductor.compile_fx")
    kernel = import_module("torch._inductor.codegen.cpp_flex_attention_template")
    template: Any = getattr(kernel, "CppFlexAttentionTemplate", None)
    allocate = getattr(template, "codegen_allocate_buffer", None)
    if allocate is None or hasattr(allocate, "__wrapped__"):
        return

    @functools.wraps(allocate)
    def allocate_if_used(self: object, name: str, dtype: str, size: str) -> str:
        code: str = allocate(self, name, dtype, f"(need_pack ? {size} : 0)" if name in _REARRANGED else size)
        return code

    template.codegen_allocate_buffer = allocate_if_used


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
