"""Builds the library of native operators; `python -m outrider.native [COMPILER]` builds it into the package.

The compiler is the one that torch.compile uses. Sources, compiler and PyTorch's version name the file, so that each is
built once for a user. The sources alone name one in the package, so that one of other sources is never taken: PyTorch's
stable ABI lets it run with later versions.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from outrider.cache import cache_dir

_FOLDER: Final = Path(__file__).parent
_COMMON: Final = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra")
_AVX512: Final = ("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_OPERATORS: Final = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)
_FLAGS: Final = {
    "library.cpp": _OPERATORS,
    "packed_product.cpp": _OPERATORS,
    "pack.cpp": _OPERATORS,
    "paged_attention.cpp": _OPERATORS,
    "scores.cpp": _OPERATORS,
    "head.cpp": _OPERATORS,
    "head_columns.cpp": _OPERATORS,
    "head_trees.cpp": _OPERATORS,
    "avx2.cpp": ("-mfma", "-mavx2"),
    "avx512.cpp": _AVX512,
    "avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
    "avx512_vnni.cpp": (*_AVX512, "-mavx512vnni"),
    "amx.cpp": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
"""Flags of each source: no code but a variant's own may use its instructions."""
_TIMEOUT_S: Final = 300.0


def is_supported() -> bool:
    """Return whether there are operators for this machine: Linux on x86-64."""
    return sys.platform.startswith("linux") and platform.machine().lower() in ("x86_64", "amd64")


def in_package() -> Path:
    """Return where the package's own library is, if there is one."""
    return _FOLDER / f"operators-{_digest(_sources())}.so"


def ensure_library() -> Path | None:
    """Return the library: the package's own, else the user's, which is built first if need be.

    Returns:
        None where there is no compiler, or no operators for this machine.

    Raises:
        OSError: it cannot be built, or the cache folder not be written.
    """
    if not is_supported():
        return None
    if (path := in_package()).exists():
        return path
    compiler = find_compiler()
    if compiler is None:
        return None
    path = (
        cache_dir() / "native" / f"operators-{_digest([compiler_version(compiler), torch.__version__, *_sources()])}.so"
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                print("compiling the native operators (once)", file=sys.stderr, flush=True)
                build(path, compiler)
    return path


def build(path: Path, compiler: str) -> None:
    """Compile the sources and put the library there at once; raise `OSError`, with the compiler's error, if it fails.

    Args:
        path: of the library.
        compiler: a command; `g++ -fsanitize=address -g` builds one that checks its memory accesses.
    """
    torch_folder = Path(torch.__file__).parent
    command = compiler.split()
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        scratch = Path(name)
        includes = ["-isystem", str(torch_folder / "include")]
        objects = [str(scratch / f"{source}.o") for source in _FLAGS]
        commands = [
            [*command, *_COMMON, *flags, *includes, "-c", str(_FOLDER / source), "-o", target]
            for (source, flags), target in zip(_FLAGS.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            list(threads.map(_run, commands))
        linked = scratch / path.name
        _run([*command, "-shared", *objects, f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-o", str(linked)])
        # A rename is atomic: other processes see the whole library or none.
        linked.rename(path)


def find_compiler() -> str | None:
    """Return the C++ compiler that torch.compile uses: CXX, else g++; None where there is none.

    PyTorch's own search would import torch.compile, which takes more than a second.
    """
    compiler = os.environ.get("CXX", "g++")
    return compiler if shutil.which(compiler) else None


def _sources() -> list[str]:
    files = sorted(file for file in _FOLDER.iterdir() if file.suffix in (".cpp", ".h"))
    return [repr((_COMMON, _FLAGS)), *(file.read_text() for file in files)]


def compiler_version(compiler: str) -> str:
    """Return what a compiler says of itself; raise `OSError` if it does not run."""
    return _run([compiler, "--version"])


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not end within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise OSError(f"{command[0]} failed: {lines[0] if lines else f'exit code {done.returncode}'}")
    return done.stdout
