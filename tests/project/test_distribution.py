"""The wheel, built from what the Dockerfile copies: complete, with its licence, and described."""

import email
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trove_classifiers

import outrider
from tests.project.distribution import PACKAGES, PROJECT, ROOT, expected_files, files_of, metadata_of
from tests.project.dockerfile import DOCKERFILE


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first stage of the Dockerfile has of this tree; nothing else is needed to build."""
    folder = tmp_path_factory.mktemp("tree")
    for text in DOCKERFILE["wheel"].values("COPY"):
        *sources, into = text.split()
        for source in sources:
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "v1" if source == "outrider" else "")
                shutil.copytree(ROOT / source, folder / into, ignore=ignored)
            else:
                shutil.copy(ROOT / source, folder / into)
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "dist"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (tree / "dist").glob("*.whl")
    return built


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    found = files_of(wheel)
    assert found == expected_files()
    assert {name.partition("/")[0] for name in found} == set(PACKAGES)
    for needed in (
        "outrider/v1/generation_pb2_grpc.py",
        "outrider/lm/embedded_heads/block/model.safetensors",
        "outrider/lm/embedded_heads/eagle3/model.safetensors",
        "orchestrator/store/lua/append.lua",
        *(f"{package}/py.typed" for package in PACKAGES),
    ):
        assert needed in found


def test_the_metadata_is_complete(wheel: Path) -> None:
    files = metadata_of(wheel)
    about = email.message_from_string(files["METADATA"])
    assert about["Version"] == outrider.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_payload() == (ROOT / "README.md").read_text()
    for name in ("LICENSE", "NOTICE"):
        assert files[f"licenses/{name}"] == (ROOT / name).read_text()
    assert "outrider = outrider.__main__:main" in files["entry_points.txt"]


def test_classifiers_exist() -> None:
    assert set(PROJECT["project"]["classifiers"]) <= trove_classifiers.classifiers
