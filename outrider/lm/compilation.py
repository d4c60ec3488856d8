"""Compiling a model's layers: once for all layers and all numbers of rows, kept on disk between starts."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from outrider.lm.embedded import cache_dir

_LOG: Final = logging.getLogger(__name__)
_MAX_VARIANTS: Final = 32
_MIN_CHUNK: Final = 16384


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
    """
    _use_disk_cache()
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=True)


def _use_disk_cache() -> None:
    import torch._dynamo.config
    import torch._inductor.config

    # Compiled loops carry the number of threads.
    folder = cache_dir() / "compiled" / f"torch-{torch.__version__}-threads-{torch.get_num_threads()}"
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


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
