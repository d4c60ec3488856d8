"""What the compiled code of layers is made from, as a key: where all of it is equal, so is the code."""

import functools
import hashlib
import inspect
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

import outrider.lm
from outrider import native
from outrider.native.build import compiler_version, find_compiler

_LOG: Final = logging.getLogger(__name__)
_KNOWN: Final = ("torch", "transformers", "outrider", "builtins", "functools")
"""Packages whose code their version, or its digest, stands for."""
_NAMES: Final = ("name_or_path", "_name_or_path", "_commit_hash")
"""Where a checkpoint comes from, which its code does not depend on."""
_CONSTANTS: Final = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)
_OF_MODULES: Final = frozenset((*vars(nn.Module()), "_compiled_call_impl", "layer_idx"))
"""Attributes that every module has, and those that differ between layers which share their code."""
_COMPILERS: Final = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "ATEN_CPU_CAPABILITY", "CXX")
"""Begins of the names of variables that PyTorch's compiler reads."""
_FOLDER: Final = "TORCHINDUCTOR_CACHE_DIR"
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")


class _Unknown(Exception):
    """Something that a key cannot stand for."""


def code_key(layers: Sequence[nn.Module], call: object, tensors: Sequence[Tensor]) -> str | None:
    """Return the key of the code of layers; None where something has a part in it that a key cannot stand for.

    Args:
        layers: in order.
        call: the constants of their call.
        tensors: that they hold and that they are called with.
    """
    try:
        parts = (_environment(), _settings(), [_of_layer(layer) for layer in layers], _shared(layers), _of_value(call))
        layouts = [(_of_value(tensor), tensor.stride(), tensor.device) for tensor in tensors]
    except Exception as error:  # a model may hold anything
        _LOG.debug("compiled code is not kept: %r", error)
        return None
    return hashlib.sha256(repr((*parts, layouts)).encode()).hexdigest()


@functools.cache
def _environment() -> tuple[object, ...]:
    """Return what all code of this process is made from."""
    if distribution("transformers").read_text("direct_url.json"):
        raise _Unknown("transformers is installed from its sources, which its version does not name")
    compiler = find_compiler()
    return (
        torch.__version__,
        version("transformers"),
        sys.version,
        _own_sources(),
        native.best_variant(),
        _cpu(),
        compiler and compiler_version(compiler),
    )


def _settings() -> tuple[object, ...]:
    """Return the compiler's settings."""
    given = sorted(item for item in os.environ.items() if item[0].startswith(_COMPILERS) and item[0] != _FOLDER)
    return torch.get_num_threads(), given


def _own_sources() -> str:
    folder = Path(outrider.lm.__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.py"), *folder.glob("native/*.cpp"), *folder.glob("native/*.h"))):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _cpu() -> str:
    """Return the CPU's instruction sets: code is compiled for this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _of_layer(layer: nn.Module) -> list[object]:
    return [(name, _of_module(module)) for name, module in layer.named_modules()]


def _of_module(module: nn.Module) -> object:
    if any(getattr(module, name) for name in _HOOKS):
        raise _Unknown(module)
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    weights = [(name, _of_value(tensor)) for name, tensor in named]
    others = {key: value for key, value in vars(module).items() if key not in (*_OF_MODULES, *_NAMES)}
    return _of_type(type(module)), weights, _of_value(others), module.training


def _of_value(value: object) -> object:
    match value:
        case Tensor() if type(value) in (Tensor, nn.Parameter, nn.Buffer):
            return tuple(value.shape), value.dtype
        case PretrainedConfig():
            return _of_value({key: item for key, item in vars(value).items() if key not in _NAMES})
        case GenerationConfig():
            # Of the choice of tokens, in which no layer has a part.
            return _of_type(type(value))
        case set() | frozenset():
            return sorted(map(repr, map(_of_value, value)))
        case Mapping():
            return [(_of_value(key), _of_value(item)) for key, item in value.items()]
        case list() | tuple():
            return _of_type(type(value)), [_of_value(item) for item in value]
        case functools.partial():
            return _of_value(value.func), _of_value(value.args), _of_value(value.keywords)
        case type():
            return _of_type(value)
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if inspect.isbuiltin(value) or (inspect.isfunction(value) and value.__closure__ is None):
        return _of_type(value)
    raise _Unknown(value)


def _of_type(kind: Any) -> tuple[str, str, str]:
    """Return the name of a class or function and the digest of the file that it is from."""
    if kind.__module__.partition(".")[0] not in _KNOWN:
        raise _Unknown(kind)
    return kind.__module__, kind.__qualname__, _digest_of(getattr(sys.modules[kind.__module__], "__file__", None))


@functools.cache
def _digest_of(path: str | None) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _shared(layers: Sequence[nn.Module]) -> list[int]:
    """Return for each weight the first place of the same tensor."""
    found = [
        id(tensor)
        for layer in layers
        for tensors in (layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False))
        for _, tensor in tensors
    ]
    return [found.index(tensor) for tensor in found]
