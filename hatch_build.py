"""Build hook: generates `outrider/v1` from `proto/outrider/v1`. Nothing is patched afterwards."""

import importlib.resources
import os
import sys
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def generate(root: Path) -> list[str]:
    """Write messages, services and type stubs below `root`; return their paths relative to it."""
    protos = sorted(str(path.relative_to(root / "proto")) for path in (root / "proto").rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{root / 'proto'}", f"-I{well_known}"]
    outputs = [f"--{kind}_out={root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    _find_plugins()
    if protoc.main([*arguments, *outputs, *protos]) != 0:
        raise RuntimeError("protoc failed; its messages stand above")
    package = root / "outrider" / "v1"
    (package / "__init__.py").write_text('"""Generated from proto/outrider/v1; see hatch_build.py."""\n')
    return [str(path.relative_to(root)) for path in sorted(package.iterdir()) if path.is_file()]


def _find_plugins() -> None:
    """Lets protoc find protoc-gen-mypy, which stands beside the interpreter whether or not its venv is activated."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class ProtocolBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the generated modules into wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate before files are collected."""
        build_data["artifacts"] += generate(Path(self.root))
