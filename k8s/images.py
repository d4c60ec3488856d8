"""Builds the images, lists what each is made of, and keeps them as archives that a node can import: `make images`.

It builds with Docker or Podman where an engine answers, and else with buildah. That needs no registry: it begins with
a Debian that mmdebstrap makes. pip's configuration on this machine, certificates and folders of wheels included, counts
while packages are installed, and stays out of the images.

The tag is the last commit of what goes into the images, a digest of it where it differs from that, and the options.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / ".cache" / "images"
BUILT: Final = FOLDER / "built.json"
"""What the last build made, for whoever tries or imports it."""
TOOLS: Final = ROOT / ".venv-images" / "bin"
PARTS: Final = ("orchestrator", "target", "draft", "whole")
OPTIONS: Final = ("embedded", "compiler")
PACKAGES: Final = "opt/outrider/lib/python3*/site-packages"
_BASE: Final = "localhost/outrider-base:bookworm"
_REGISTRY: Final = "docker.io/outrider"
# Of pip's configuration, what decides where packages come from.
_INDEX_SETTINGS: Final = ("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "proxy", "timeout")
_CA: Final = "/run/secrets/ca"
_FILE_TIME: Final = "315532800"
"""Of all files, 1980, which wheels can hold: layers that an earlier build left would have another commit's."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that was built.

    Attributes:
        part: stage of the Dockerfile.
        reference: name and tag.
        archive: of `docker save`.
        root: folder with its files.
        num_bytes: of all its files.
        build_s: seconds that the build took.
    """

    part: str
    reference: str
    archive: str
    root: str
    num_bytes: int
    build_s: float


def built() -> dict[str, Image]:
    """Return the images of the last build, by part; none where there was no build."""
    return {item["part"]: Image(**item) for item in json.loads(BUILT.read_text())} if BUILT.is_file() else {}


def context_paths(root: Path = ROOT) -> list[str]:
    """Return the paths that images are made from."""
    lines = (root / ".dockerignore").read_text().splitlines()
    return ["Dockerfile", ".dockerignore", *(line[1:] for line in lines if line.startswith("!"))]


def tag(options: Sequence[str], root: Path = ROOT) -> str:
    """Return the tag of images that are built with some of `OPTIONS`."""
    paths = context_paths(root)
    parts = [_git(root, "log", "-1", "--abbrev=12", "--format=%h", "--", *paths)]
    if _git(root, "status", "--porcelain", "--", *paths):
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths)
        digest = hashlib.sha256()
        for name in sorted(set(listed.split("\0")) - {""}):
            path = root / name
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        parts += ["dirty", digest.hexdigest()[:8]]
    return "-".join([*parts, *options])


def pip_settings(listing: str) -> dict[str, str]:
    """Return pip's configuration by name, from what `pip config list` prints: the environment counts most."""
    found: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: (line.startswith(":env:"), "install." in line)):
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].replace("_", "-").removeprefix("default-")
        found[name] = str(ast.literal_eval(value))
    return found


def local_folders(settings: Mapping[str, str]) -> list[str]:
    """Return the folders of this machine that pip's configuration takes packages from."""
    found = set()
    for name in ("find-links", "index-url", "extra-index-url"):
        for place in settings.get(name, "").split():
            path = Path(url2pathname(urlsplit(place).path) if place.startswith("file:") else place)
            # The pages of an index link to files beside it.
            found.add(path if name == "find-links" else path.parent)
    return sorted(str(path) for path in found if path.is_absolute() and path.is_dir())


@functools.cache
def engine() -> str:
    """Return what builds images here: docker or podman with an engine that answers, or buildah."""
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    if shutil.which("buildah") and shutil.which("mmdebstrap"):
        return "buildah"
    _fail("nothing builds images here: install buildah and mmdebstrap, or start Docker or Podman")


def command() -> list[str]:
    """Return the command of the engine. buildah keeps its storage in `.cache`."""
    if engine() != "buildah":
        return [engine()]
    # Not below `.cache`: what lies there names mounts of this boot.
    state = Path(tempfile.gettempdir()) / f"outrider-images-{os.getuid()}"
    return ["buildah", "--root", str(FOLDER / "storage"), "--runroot", str(state)]


def ensure_base() -> str:
    """Return the name of a Debian with Python, pip and certificates; make it first if needed."""
    if subprocess.run([*command(), "inspect", "--type", "image", _BASE], capture_output=True, check=False).returncode:
        print("images: a Debian base, by mmdebstrap", flush=True)
        archive = FOLDER / "base.tar"
        hooks = ["ln -s /usr/bin/python3 $1/usr/local/bin/python", "rm -f $1/etc/resolv.conf $1/etc/hostname"]
        without = [f"path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")]
        _run(
            ["mmdebstrap", "--quiet", "--variant=minbase", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"],
            ["--include=usr-is-merged,python3,python3-pip,ca-certificates"],
            [f"--dpkgopt={option}" for option in (*without, "path-include=/usr/share/doc/*/copyright")],
            [f"--customize-hook={hook}" for hook in hooks],
            ["bookworm", str(archive)],
        )
        container = _output([*command(), "from", "scratch"])
        _run(command(), ["add", "--quiet", container, str(archive), "/"])
        _run(command(), ["commit", "--quiet", "--rm", container, _BASE])
        archive.unlink()
    return _BASE


def build(part: str, reference: str, options: Sequence[str], base: str, torch_index: str) -> None:
    """Build one image from the Dockerfile."""
    settings = pip_settings(_output([sys.executable, "-m", "pip", "config", "list"]))
    chosen = {name: settings[name] for name in _INDEX_SETTINGS if name in settings}
    revision, committed = _git(ROOT, "log", "-1", "--format=%H %ct", "--", *context_paths()).split()
    arguments = {"SOURCE_DATE_EPOCH": _FILE_TIME, "TORCH_INDEX": torch_index} | {name.upper(): "1" for name in options}
    labels = {
        "revision": revision,
        "version": _version(),
        "created": datetime.fromtimestamp(int(committed), UTC).isoformat(),
        "source": _source(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        secrets = []
        if certificates := settings.get("cert"):
            secrets.append(f"id=ca,src={certificates}")
            chosen["cert"] = _CA
        if chosen:
            file = Path(scratch) / "pip.conf"
            lines = (f"{name} = {' '.join(value.split())}" for name, value in chosen.items())
            file.write_text("\n".join(["[global]", *lines]) + "\n")
            secrets.append(f"id=pip,src={file}")
        call = [*command(), "build", "--target", part, "--tag", reference]
        if base or engine() == "buildah":
            arguments["PYTHON"] = base or ensure_base()
        if engine() == "docker":
            if folders := local_folders(settings):
                print(f"images: Docker mounts no folders into builds, so none of {', '.join(folders)}", flush=True)
        else:
            # OCI's format has no HEALTHCHECK.
            call += ["--format", "docker", "--layers", "--timestamp", _FILE_TIME]
            call += ["--pull-never" if not base else "--pull"]
            call += [f"--volume={folder}:{folder}:ro" for folder in local_folders(settings)]
        if engine() == "buildah":
            call += ["--isolation", "chroot"]
        call += [f"--secret={secret}" for secret in secrets]
        call += [f"--build-arg={name}={value}" for name, value in arguments.items() if value]
        call += [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels.items() if value]
        log = FOLDER / f"{part}.log"
        with log.open("w") as output:
            done = subprocess.run([*call, "."], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            _fail(f"{part} was not built, see {log}:\n" + "".join(log.read_text().splitlines(keepends=True)[-20:]))


def save(reference: str, archive: Path) -> None:
    """Write an image to an archive, as `docker save` does."""
    archive.unlink(missing_ok=True)
    if engine() == "buildah":
        _run(command(), ["push", "--quiet", reference, f"docker-archive:{archive}:{reference}"])
    else:
        _run(command(), ["save", "--output", str(archive), reference])


def layers(archive: Path) -> Iterator[tarfile.TarFile]:
    """Yield the layers of an archive, the lowest first."""
    with tarfile.open(archive) as outer:
        for name in _manifest(outer)["Layers"]:
            with tarfile.open(fileobj=outer.extractfile(name)) as layer:
                yield layer


def configuration(archive: Path) -> dict[str, object]:
    """Return the configuration of an archived image: what runs, as whom, and its labels."""
    with tarfile.open(archive) as outer:
        content = outer.extractfile(_manifest(outer)["Config"])
        assert content is not None
        found: dict[str, object] = json.load(content)["config"]
        return found


def unpack(archive: Path, root: Path) -> int:
    """Write the files of an archived image to a folder, in place of what is there; return their bytes."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for layer in layers(archive):
        for member in layer:
            path = Path(member.name)
            if path.name.startswith(".wh."):
                _fail(f"{archive} takes {path} away in a layer: its files are in the one below")
            layer.extract(member, root, numeric_owner=True, filter="fully_trusted")
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def list_components(image: Image, file: Path) -> int:
    """Write an image's Python packages as a CycloneDX bill of materials; return how many there are.

    Debian's packages are listed in the image itself, in /var/lib/dpkg.
    """
    with _environment_of(image) as environment:
        options = ["--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(file)]
        _run([str(TOOLS / "cyclonedx-py"), "environment", *options, str(environment)])
    return len(json.loads(file.read_text())["components"])


def audit(image: Image) -> tuple[str, bool]:
    """Look for known vulnerabilities of an image's Python packages; see `audit_result`."""
    (packages,) = Path(image.root).glob(PACKAGES)
    call = [str(TOOLS / "pip-audit"), "--path", str(packages), "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    return audit_result(done.stdout, done.stderr)


def audit_result(output: str, errors: str) -> tuple[str, bool]:
    """Return what pip-audit found in one line, and whether that is harmless.

    Args:
        output: its JSON; empty where it failed.
        errors: its standard error.
    """
    if not output.strip():
        return f"pip-audit: its database was not reachable: {(errors.strip().splitlines() or ['no output'])[-1]}", True
    found = [item for item in json.loads(output)["dependencies"] if item["name"] != "outrider"]
    known = [item for item in found if "skip_reason" not in item]
    if not known:
        return f"pip-audit: its database was not reachable: it has none of {len(found)} packages", True
    text = f"pip-audit: {len(known)} of {len(found)} packages checked"
    if problems := [f"{item['name']} {item['version']}: {bug['id']}" for item in known for bug in item["vulns"]]:
        return f"{text}, known vulnerabilities: {', '.join(problems)}", False
    return f"{text}, no known vulnerability", True


@contextmanager
def _environment_of(image: Image) -> Iterator[Path]:
    """Yield a virtual environment of this machine with an image's packages: its own has the image's interpreter."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch)
        venv.create(environment, with_pip=False)
        (ours,) = environment.glob("lib/python3*/site-packages")
        (packages,) = Path(image.root).glob(PACKAGES)
        ours.rmdir()
        ours.symlink_to(packages)
        yield environment


def _manifest(outer: tarfile.TarFile) -> dict[str, object]:
    content = outer.extractfile("manifest.json")
    assert content is not None
    (found,) = json.load(content)
    return found


def _version() -> str:
    line = next(line for line in (ROOT / "outrider" / "__init__.py").read_text().splitlines() if "__version__" in line)
    return str(ast.literal_eval(line.partition("=")[2].strip()))


def _source() -> str:
    """Return where the code comes from; empty where that is no public address."""
    done = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False)
    return url if (url := done.stdout.strip()).startswith("https://") and "@" not in url else ""


def _git(root: Path, *arguments: str) -> str:
    return _output(["git", "-C", str(root), *arguments])


def _output(call: Sequence[str]) -> str:
    try:
        return subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        _fail(f"{' '.join(call[:3])}: {error}")


def _run(*words: Sequence[str]) -> None:
    call = [word for part in words for word in part]
    done = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        _fail(f"{' '.join(call[:4])} ended with {done.returncode}:\n{done.stdout[-2000:]}")


def _fail(problem: str) -> NoReturn:
    sys.exit(f"images: error: {problem}")


def main() -> None:
    """Build, list, audit and save the images that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m k8s.images", description=main.__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; all by default")
    parser.add_argument("--embedded", action="store_true", help="target and draft bring the embedded model")
    parser.add_argument("--compiler", action="store_true", help="targets compile their layers on a CPU")
    parser.add_argument("--base", default="", help="image to begin with; by default python:slim, or a Debian made here")
    parser.add_argument("--torch-index", default="", help="package index for PyTorch beside pip's own")
    chosen = parser.parse_args()
    if unknown := [part for part in chosen.parts if part not in PARTS]:
        parser.error(f"there is no image {unknown[0]!r}, but {', '.join(PARTS)}")
    options = [name for name in OPTIONS if getattr(chosen, name)]
    version = tag(options)
    FOLDER.mkdir(parents=True, exist_ok=True)
    BUILT.unlink(missing_ok=True)
    print(f"images: with {engine()}, tag {version}", flush=True)
    made, is_harmless = [], True
    for part in chosen.parts or PARTS:
        reference = f"{_REGISTRY}/{part}:{version}"
        started = time.monotonic()
        build(part, reference, options, chosen.base, chosen.torch_index)
        build_s = time.monotonic() - started
        archive, root = FOLDER / f"{part}-{version}.tar", FOLDER / "roots" / part
        for old in FOLDER.glob(f"{part}-*.tar"):
            old.unlink()
        save(reference, archive)
        image = Image(part, reference, str(archive), str(root), unpack(archive, root), round(build_s, 1))
        components = list_components(image, FOLDER / f"{part}-{version}.cdx.json")
        found, harmless = audit(image)
        is_harmless &= harmless
        print(f"images: {part}: {image.num_bytes / 1e6:.0f} MB in {build_s:.0f} s, {components} packages; {found}")
        print(f"images: {part}: {archive.relative_to(ROOT)}", flush=True)
        made.append(image)
        BUILT.write_text(json.dumps([asdict(item) for item in made], indent=1))
    if not is_harmless:
        _fail("packages with known vulnerabilities, see above")


if __name__ == "__main__":
    main()
