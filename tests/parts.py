"""Runs the tests that `make test` leaves out, in parts, and prints what each took: `make test-all`.

`make test-all PART=exactness` runs one of them. What no part names is in `rest`, so that nothing can be forgotten.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

PARTS: Final[Mapping[str, Sequence[str]]] = {
    "exactness": (
        "tests/exactness",
        "tests/speculation/test_draws.py",
        "tests/speculation/test_randomness.py",
        "tests/served/test_distribution.py",
        "tests/served/test_equality.py",
    ),
    "faults": ("tests/faults",),
    "attacks": ("tests/attacks",),
    "benches": ("tests/bench",),
    "models": (
        "tests/lm",
        "tests/drafters",
        "tests/training",
        "tests/served/test_distilled.py",
        "tests/target_service/engine/test_ranks.py",
    ),
    "documentation": ("tests/docs", "tests/client/test_documentation.py"),
    "browser": ("tests/browser",),
    "rest": ("tests",),
    "site": (),
    "kubernetes": (),
}
_MADE: Final[Mapping[str, str]] = {"browser": "browser", "site": "docs", "kubernetes": "cluster"}
"""Parts that need more than Python packages, and the make targets that install it."""
_NO_TESTS: Final = 5


def command(part: str) -> list[str]:
    """Returns how to run a part."""
    if part in _MADE:
        return ["make", _MADE[part]]
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "slow", *PARTS[part]]
    if part == "rest":
        pytest += [f"--ignore={path}" for paths in PARTS.values() for path in paths if path != "tests"]
    return pytest


def run(part: str) -> tuple[bool, float]:
    """Runs a part; returns whether it passed, and its seconds."""
    print(f"== {part}", flush=True)
    started = time.monotonic()
    code = subprocess.run(command(part), check=False).returncode
    return code == 0 or (part == "rest" and code == _NO_TESTS), time.monotonic() - started


def main() -> None:
    """Runs the parts that are named, or all; ends with 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make test-all", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part is named {unknown[0]!r}; there are: {', '.join(PARTS)}")
    results = {part: run(part) for part in parts}
    for part, (has_passed, seconds) in results.items():
        print(f"{part:12} {'passed' if has_passed else 'FAILED'} {seconds / 60:6.1f} min")
    raise SystemExit(not all(has_passed for has_passed, _ in results.values()))


if __name__ == "__main__":
    main()
