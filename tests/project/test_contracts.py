"""The contracts only grow: what breaks callers of the last release fails `make lint`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"
BUF = Path(sys.executable).with_name("buf")
BREAKING = {
    "a field goes": ("generation.proto", "  string session_id = 2;\n", ""),
    "a field gets another type": ("generation.proto", "  string session_id = 2;", "  bytes session_id = 2;"),
    "a field gets another number": ("generation.proto", "  string session_id = 2;", "  string session_id = 200;"),
    "a call gets another name": ("generation.proto", "rpc DeleteSession(", "rpc RemoveSession("),
    "a stream becomes a single answer": (
        "generation.proto",
        "returns (stream GenerateResponse)",
        "returns (GenerateResponse)",
    ),
}


def breaking(proto: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUF, "breaking", proto, "--against", PROTO / "released.binpb"], capture_output=True, text=True, check=False
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROTO, tmp_path / "proto"))


def change(proto: Path, file: str, before: str, after: str) -> None:
    path = proto / "outrider" / "v1" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_the_contracts_break_nothing() -> None:
    found = breaking(PROTO)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("what", BREAKING)
def test_a_breaking_change_is_found(what: str, copied: Path) -> None:
    change(copied, *BREAKING[what])
    found = breaking(copied)
    assert found.returncode == 100
    assert BREAKING[what][0] in found.stdout


def test_a_new_field_breaks_nothing(copied: Path) -> None:
    field = "  string session_id = 2;\n"
    change(copied, "generation.proto", field, f"{field}  // Whatever comes next.\n  string new_field = 999;\n")
    found = breaking(copied)
    assert found.returncode == 0, found.stdout
