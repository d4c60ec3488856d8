"""What is in the images that were built, and what is not."""

import hashlib
import json
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

from k8s.images import PACKAGES, Image, configuration, layers, pip_settings
from outrider.lm.embedded import _FOLDER as MODEL
from tests.images.conftest import Report
from tests.k8s import rendering
from tests.project import dockerfile

pytestmark = pytest.mark.images

_MAX_ORCHESTRATOR_BYTES: Final = 350_000_000
_UNCHECKED: Final = 1
_COMPILERS: Final = {"gcc", "g++", "cc", "c++", "clang", "clang++", "ld", "as"}


def _options(image: Image) -> set[str]:
    return set(image.reference.rpartition(":")[2].split("-")) if image.part != "orchestrator" else set()


def _files(image: Image) -> list[Path]:
    """The regular files, without links."""
    return [path for path in Path(image.root).rglob("*") if path.is_file() and not path.is_symlink()]


def test_no_pip_no_headers_no_compiler_no_setuid(image: Image, report: Report) -> None:
    found = _files(image)
    report(f"{image.part}: {image.num_bytes / 1e6:.0f} MB in {len(found)} files, built in {image.build_s:.0f} s")
    assert len(found) > 1000
    assert not [path for path in found if path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)]
    names = {path.name.lower() for path in found} | {path.parent.name for path in found}
    assert not names & {"pip", "pip3", "ensurepip"}
    if "compiler" not in _options(image):
        programs = {path.name for path in Path(image.root).rglob("*bin/*")}
        assert "python" in programs
        assert not programs & _COMPILERS
        # Packages bring sources of their own; what a compiler needs of Python and PyTorch is not there.
        assert "Python.h" not in {path.name for path in found}
        assert not list(Path(image.root).glob("usr/**/include/*"))
        assert not list(Path(image.root).glob(f"{PACKAGES}/torch/include"))


def test_the_orchestrator_is_small_and_has_no_model_library(orchestrator: Image) -> None:
    assert orchestrator.num_bytes < _MAX_ORCHESTRATOR_BYTES
    (packages,) = Path(orchestrator.root).glob(PACKAGES)
    assert not {"torch", "transformers", "numpy"} & {path.name for path in packages.iterdir()}


def test_nothing_of_the_machine_that_built_it_remains(image: Image) -> None:
    """In no layer, and not in what the image says of itself: pip's configuration, certificates, folders of wheels."""
    settings = pip_settings(
        subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
    )
    certificates = Path(settings["cert"]).read_bytes() if "cert" in settings else b"none"
    digest, names = hashlib.sha256(certificates).digest(), []
    for layer in layers(Path(image.archive)):
        for member in layer:
            names.append(member.name)
            if member.isfile() and member.size == len(certificates):
                content = layer.extractfile(member)
                assert content is not None
                assert hashlib.sha256(content.read()).digest() != digest, member.name
    assert len(names) > 1000
    forbidden = ("etc/pip.conf", "run/secrets", "source/", "wheels/", "embedded/", "etc/xdg/pip")
    assert not [name for name in names if name.removeprefix("./").startswith(forbidden)]
    words = {word for name, value in settings.items() if name != "timeout" for word in value.split() if len(word) > 4}
    with tarfile.open(image.archive) as archive:
        said = [archive.extractfile(item).read().decode() for item in archive if item.name.endswith(".json")]  # type: ignore[union-attr]
    assert any("Entrypoint" in text for text in said)
    assert not [word for word in words for text in said if word in text]


def test_the_image_describes_itself(image: Image) -> None:
    found = configuration(Path(image.archive))
    labels = {name.rpartition(".")[2]: value for name, value in found["Labels"].items()}
    assert {"title", "description", "licenses", "version", "revision", "created"} <= set(labels)
    assert labels["licenses"] == "Apache-2.0"
    assert image.reference.rpartition(":")[2].startswith(labels["revision"][:7])
    assert found["User"] == "10001:10001"
    assert found["WorkingDir"] == "/tmp"
    assert found["Healthcheck"]["Test"] == ["CMD", "python", "-m", "outrider.serving", "readiness"]
    assert found["Entrypoint"] == json.loads(dockerfile.last(image.part, "ENTRYPOINT"))


def test_all_files_have_one_time(image: Image) -> None:
    """Also in layers that an earlier build left, so that a tag names one image."""
    times = {member.mtime for layer in layers(Path(image.archive)) for member in layer}
    assert times == {315532800}


def test_byte_code_is_there_for_all_code_and_is_not_checked(image: Image) -> None:
    """With byte code that is checked against the times of files, each start would compile everything anew."""
    root = Path(image.root)
    (packages,), (stdlib,) = root.glob(PACKAGES), (path.parent for path in root.glob("usr/**/python3*/os.py"))
    sources = [path for folder in (packages, stdlib) for path in folder.rglob("*.py")]
    assert len(sources) > 2000
    (version,) = {path.name.split(".")[-2] for path in (stdlib / "__pycache__").glob("os.*.pyc")}
    missing = 0
    for source in sources:
        compiled = source.parent / "__pycache__" / f"{source.stem}.{version}.pyc"
        if compiled.is_file():
            assert int.from_bytes(compiled.read_bytes()[4:8], "little") == _UNCHECKED, compiled
        else:
            missing += 1
    # Templates and examples for other versions of Python are no code for this one.
    assert missing < 20


def test_the_embedded_model_is_converted_where_it_was_asked_for(image: Image) -> None:
    folder = Path(image.root) / "opt" / "outrider" / "share" / "outrider" / MODEL
    wanted = image.part == "whole" or "embedded" in _options(image)
    assert (folder / "model.safetensors").is_file() == wanted
    assert not list(Path(image.root).rglob("*.gguf"))


def test_components_are_listed(image: Image) -> None:
    (packages,) = Path(image.root).glob(PACKAGES)
    listed = json.loads(Path(image.archive).with_suffix(".cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    names = {item["name"].lower().replace("_", "-") for item in listed["components"]}
    installed = {path.name.partition("-")[0].lower().replace("_", "-") for path in packages.glob("*.dist-info")}
    assert len(installed) > 40
    assert {name.replace(".", "-") for name in names} >= installed - {"outrider"}
    assert listed["metadata"]["component"]["name"] == "outrider"


def test_volumes_of_the_manifests_have_their_places(image: Image) -> None:
    if image.part in ("orchestrator", "whole"):
        pytest.skip("no volumes but /tmp, or no manifest")
    workload = rendering.workloads(rendering.kustomize(rendering.K8S / "base"))[image.part]
    for mount in rendering.container(workload)["volumeMounts"]:
        if mount["mountPath"].startswith("/dev/"):
            continue
        assert (Path(image.root) / mount["mountPath"].strip("/")).is_dir()
