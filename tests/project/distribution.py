"""What a wheel must contain: every file of the packages in the tree, and the code that is generated from `proto/`."""

import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
GENERATED = "outrider/v1"


def expected_files(root: Path = ROOT) -> set[str]:
    """Returns the paths that a wheel of this tree has, without its metadata."""
    found = {
        str(path.relative_to(root))
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    in_tree = {path for path in found if not path.startswith(f"{GENERATED}/")}
    protos = [path.stem for path in (root / "proto" / GENERATED).glob("*.proto")]
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    return in_tree | {f"{GENERATED}/__init__.py", *(f"{GENERATED}/{stem}{end}" for stem in protos for end in endings)}


def files_of(wheel: Path) -> set[str]:
    """Returns the paths within a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


def metadata_of(wheel: Path) -> dict[str, str]:
    """Returns the files of a wheel's metadata folder by their paths within it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" in name]
        return {name.partition(".dist-info/")[2]: archive.read(name).decode() for name in names}
