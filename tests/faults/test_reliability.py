"""docs/reliability.md names a test for every fault, and that test exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_FAULTS = 46


def test_every_fault_has_a_test_that_exists() -> None:
    faults, _, _ = (ROOT / "docs/reliability.md").read_text().partition("## Attacks")
    rows = re.findall(r"^\| (\d+) .*`(tests/[\w/]+\.py)::(\w+)`", faults, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, NUM_FAULTS + 1))
    for number, file, name in rows:
        assert f"def {name}(" in (ROOT / file).read_text(), name
        assert name.startswith(f"test_fault_{int(number):02d}_"), name
