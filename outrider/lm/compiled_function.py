"""A compiled function of tensors, called without the compiler's Python, which takes as long as a small product.

The compiler makes a shared library with one entry for Python. Around it, it checks and wraps for cases that a function
of tensors which needs no gradients does not have. A library that is kept is loaded without the compiler.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

Run: TypeAlias = Callable[..., Sequence[Any]]
"""Takes the inputs, each as an argument, and returns the outputs."""

_ENTRY: Final = "inductor_entry_cpp"
_PLAIN: Final = frozenset(("args", "arg", "input_tensors", "input_handles", "output_handles", "output_tensors"))
"""Variables of the compiler's own call of an entry that is given the inputs and nothing else."""
_LOG: Final = logging.getLogger(__name__)
_COMPILING: Final = threading.Lock()


class CompiledFunction:
    """The entry of a library.

    Args:
        library: that the compiler made, with this process's version of PyTorch.

    Attributes:
        library: see there.

    Raises:
        ImportError: it cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        self.library = library
        # Where the library finds the tensors of Python's objects; the compiler tells it in the same way.
        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
        spec = importlib.util.spec_from_file_location(f"{library.stem}.{_ENTRY}", library)
        if spec is None or spec.loader is None:
            raise ImportError(f"{library} is no library")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._entry: Any = getattr(module, _ENTRY)
        self._to_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
        self._to_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

    def __call__(self, *tensors: Tensor) -> list[Any]:
        """Return the outputs."""
        outputs: list[Any] = self._to_tensors(self._entry(self._to_handles(list(tensors))))
        return outputs


def compile_function(graph: fx.GraphModule, inputs: Sequence[Any], tensors: Sequence[Tensor] = ()) -> Run:
    """Compile a graph: to a `CompiledFunction`, or where that cannot be, to what the compiler returns.

    Args:
        graph: of functions of tensors, which returns tensors.
        inputs: example tensors, whose symbolic sizes are those of the graph.
        tensors: with which both are called, to take the function only if its outputs are equal; none where the caller
            compares what it returns.
    """
    from torch._inductor import standalone_compile
    from torch._inductor.codecache import PyCodeCache

    with _COMPILING:
        # It lists the modules that are made from now on.
        PyCodeCache.cache_clear()
        artifact: Run = standalone_compile(graph, list(inputs), dynamic_shapes="from_graph")
        modules = list(PyCodeCache.modules)
    function = _function_of(modules, len(inputs))
    if function is None or (tensors and not _are_equal(function(*tensors), artifact(*tensors))):
        _LOG.info("compiled code is called in the compiler's way, and not kept")
        return artifact
    return function


def _function_of(modules: Sequence[ModuleType], num_inputs: int) -> CompiledFunction | None:
    """Return the function of the one module that has an entry; None where its call does more than to call that.

    Where inputs are quantised tensors, or some of them views of others, the entry takes other inputs than the graph; it
    would read whatever is in memory behind those that it is given.
    """
    try:
        (module,) = (module for module in modules if hasattr(module, "inductor_entry"))
        is_plain = _PLAIN.issuperset(module.call.__code__.co_varnames)
        if not is_plain or f"raii_handles(input_handles, {num_inputs})" not in module.cpp_wrapper_src:
            return None
        return CompiledFunction(Path(module.inductor_entry.__self__.__file__))
    except (AttributeError, ImportError, ValueError):  # a version of PyTorch that does it in another way
        return None


def _are_equal(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))
