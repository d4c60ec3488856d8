"""What `k8s.images` decides before and after it builds; `tests/images` has what is in images that were built."""

import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from k8s.images import audit_result, configuration, context_paths, local_folders, pip_settings, tag, unpack
from tests.images.containers import seccomp
from tests.k8s.rendering import K8S

ROOT = K8S.parent


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit of a file that goes into images, and of one that does not."""
    (tmp_path / ".dockerignore").write_text("*\n!code\n!k8s/constraints.txt\n**/__pycache__\n")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("a = 1\n")
    (tmp_path / "notes.md").write_text("notes\n")
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    return tmp_path


def _git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def _commit(folder: Path) -> None:
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", "a", "--no-verify")


def test_the_tag_follows_what_goes_into_images(repository: Path) -> None:
    clean = tag((), repository)
    assert len(clean) == 12
    assert tag(("embedded",), repository) == f"{clean}-embedded"
    (repository / "notes.md").write_text("other notes\n")
    assert tag((), repository) == clean
    _commit(repository)
    assert tag((), repository) == clean, "no commit of what goes into images"
    (repository / "code" / "a.py").write_text("a = 2\n")
    changed = tag((), repository)
    assert changed.startswith(f"{clean}-dirty-")
    (repository / "code" / "b.py").write_text("")
    assert tag((), repository) not in (clean, changed)
    (repository / "code" / "b.py").unlink()
    assert tag((), repository) == changed
    _commit(repository)
    assert tag((), repository) not in (clean, changed)
    assert "dirty" not in tag((), repository)


def test_what_goes_into_images_is_what_docker_sends() -> None:
    paths = context_paths()
    assert {"Dockerfile", ".dockerignore", "outrider", "k8s/constraints.txt"} <= set(paths)
    assert all((ROOT / path).exists() for path in paths)


def test_the_environment_of_pip_counts_most() -> None:
    listing = (
        ":env:.find-links='/wheels'\n:env:.default-timeout='9'\nglobal.find-links='/other'\nglobal.cert='/a.pem'\n"
    )
    assert pip_settings(listing) == {"find-links": "/wheels", "timeout": "9", "cert": "/a.pem"}
    assert pip_settings("") == {}


def test_folders_are_those_of_wheels_and_of_indexes_on_disk(tmp_path: Path) -> None:
    wheels, simple = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    simple.mkdir(parents=True)
    settings = {
        "find-links": f"{wheels} https://example.com/wheels {tmp_path / 'missing'}",
        "extra-index-url": f"file://{simple} https://example.com/simple",
        "cert": str(tmp_path),
    }
    # An index's pages name files beside it.
    assert local_folders(settings) == sorted([str(wheels), str(simple.parent)])


def test_an_audit_says_what_it_found() -> None:
    checked = {"name": "a", "version": "1", "vulns": []}
    unknown = {"name": "b", "skip_reason": "Dependency not found on PyPI"}
    ours = {"name": "outrider", "skip_reason": "Dependency not found on PyPI"}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": []}]}
    for found, expected, is_harmless in (
        ([checked, unknown, ours], "1 of 2 packages checked, no known vulnerability", True),
        ([unknown, ours], "its database was not reachable: it has none of 1 packages", True),
        ([checked, bad], "2 of 2 packages checked, known vulnerabilities: c 2: CVE-1", False),
    ):
        assert audit_result(json.dumps({"dependencies": found}), "") == (f"pip-audit: {expected}", is_harmless)
    assert audit_result("", "Traceback\nConnectionError: no\n")[0].endswith("not reachable: ConnectionError: no")


def test_an_archive_is_unpacked_layer_by_layer(tmp_path: Path) -> None:
    archive, root = tmp_path / "a.tar", tmp_path / "root"
    root.mkdir()
    (root / "old").write_text("")
    with tarfile.open(archive, "w") as outer:
        for name, files in (("1.tar", {"a": b"1", "b": b"22"}), ("2.tar", {"a": b"333"})):
            _add(outer, name, _layer(files))
        _add(outer, "c.json", json.dumps({"config": {"User": "10001"}}).encode())
        _add(outer, "manifest.json", json.dumps([{"Config": "c.json", "Layers": ["1.tar", "2.tar"]}]).encode())
    assert unpack(archive, root) == 5
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"a": b"333", "b": b"22"}
    assert configuration(archive) == {"User": "10001"}


def test_a_file_that_a_layer_takes_away_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as outer:
        _add(outer, "1.tar", _layer({"folder/.wh.secret": b""}))
        _add(outer, "manifest.json", json.dumps([{"Config": "c.json", "Layers": ["1.tar"]}]).encode())
    with pytest.raises(SystemExit, match="secret"):
        unpack(tmp_path / "a.tar", tmp_path / "root")


def _layer(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for name, content in files.items():
            _add(layer, name, content)
    return buffer.getvalue()


def _add(outer: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    outer.addfile(member, io.BytesIO(content))


def test_seccomp_has_the_rules_for_a_process_without_capabilities() -> None:
    def rule(names: list[str], includes: dict[str, object], excludes: dict[str, object]) -> dict[str, object]:
        return {"names": names, "action": "SCMP_ACT_ALLOW", "args": None, "includes": includes, "excludes": excludes}

    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 38,
        "archMap": [],
        "syscalls": [
            rule(["read"], {}, {}),
            rule(["bpf"], {"caps": ["CAP_SYS_ADMIN"]}, {}),
            rule(["socket"], {}, {"caps": ["CAP_AUDIT_WRITE"]}),
            rule(["other"], {"arches": ["of-no-machine"]}, {}),
        ],
    }
    assert [item["names"] for item in seccomp(profile)["syscalls"]] == [["read"], ["socket"]]
    capable = seccomp(profile, ("CAP_SYS_ADMIN", "CAP_AUDIT_WRITE"))["syscalls"]
    assert [item["names"] for item in capable] == [["read"], ["bpf"]]
