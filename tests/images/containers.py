"""Containers of images under runc, secured as the manifests have them."""

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from k8s.images import Image, configuration
from tests.k8s import rendering

SECCOMP = Path("/usr/share/containers/seccomp.json")
"""The default profile of Podman, which Debian's buildah brings; that of containerd allows less."""
_STATE = Path("/run/outrider-images")
_START_S = 300.0
_STOP_S = 60.0
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


class Container:
    """A running container of an image, on this machine's loopback interface.

    User, root file system, capabilities, privileges, mounted volumes and environment are those of the service's
    container in `k8s/base`; the one image with everything has those of the target.

    Args:
        image: what runs.
        folder: for its volumes and its log.
        environment: in addition to the manifest's.
        files: paths in the container, and what is mounted there, for reading.
    """

    def __init__(
        self, image: Image, folder: Path, environment: Mapping[str, str], files: Mapping[str, Path] | None = None
    ) -> None:
        objects = rendering.kustomize(rendering.K8S / "base")
        workload = rendering.workloads(objects)["target" if image.part == "whole" else image.part]
        self.name = f"{image.part}-{os.getpid()}"
        self.log = folder / f"{self.name}.log"
        self.volumes = folder / f"{self.name}-volumes"
        self._bundle = folder / f"{self.name}-bundle"
        self._files = files or {}
        self._process: subprocess.Popen[bytes] | None = None
        found = configuration(Path(image.archive))
        variables = dict(item.split("=", 1) for item in found["Env"])
        if image.part != "whole":
            variables |= rendering.environment(objects, workload)
        self.check: list[str] = found["Healthcheck"]["Test"][1:]
        self._spec = _spec(image, workload, [*found["Entrypoint"], *(found.get("Cmd") or ())])
        self._spec["process"]["cwd"] = found["WorkingDir"]
        self._spec["process"]["env"] = [f"{key}={value}" for key, value in (variables | dict(environment)).items()]

    def __enter__(self) -> Self:
        owner = self._spec["process"]["user"]
        for mount in self._spec["mounts"]:
            if mount["source"] == "volume":
                source = self.volumes / mount["destination"].strip("/")
                source.mkdir(parents=True)
                os.chown(source, owner["uid"], owner["gid"])
                mount["source"] = str(source)
        for path, source in self._files.items():
            self._spec["mounts"].append(_bound(path, source))
        self._bundle.mkdir()
        (self._bundle / "config.json").write_text(json.dumps(self._spec))
        with self.log.open("wb") as log:
            call = ["runc", "--root", str(_STATE), "run", "--bundle", str(self._bundle), self.name]
            self._process = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._runc("delete", "--force", self.name)
        if self._process is not None:
            self._process.wait(_STOP_S)
        shutil.rmtree(self.volumes, ignore_errors=True)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, with its user and privileges."""
        return self._runc("exec", self.name, *command)

    def wait_healthy(self) -> None:
        """Wait until the image's health check succeeds."""
        give_up = time.monotonic() + _START_S
        while (checked := self.run(*self.check)).returncode:
            assert self._process is not None and self._process.poll() is None, self.output()
            assert time.monotonic() < give_up, f"{checked.stdout}{checked.stderr}\n{self.output()}"
            time.sleep(0.2)

    def terminate(self) -> int:
        """Send SIGTERM, as a kubelet does, and return the exit status."""
        assert self._process is not None
        self._runc("kill", self.name, "TERM")
        return self._process.wait(_STOP_S)

    def status(self) -> dict[str, str]:
        """Return what Linux has to say of the first process: its users, capabilities, seccomp mode."""
        pid = json.loads(self._runc("state", self.name).stdout)["pid"]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def output(self) -> str:
        """Return what it has written."""
        return self.log.read_text(errors="replace")[-5000:]

    def _runc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        call = ["runc", "--root", str(_STATE), *arguments]
        return subprocess.run(call, capture_output=True, text=True, timeout=_STOP_S, check=False)


def seccomp(profile: Mapping[str, Any], capabilities: Sequence[str] = ()) -> dict[str, Any]:
    """Return a profile as runc takes it: the rules of this architecture for a process with these capabilities."""
    rules = []
    for rule in profile["syscalls"]:
        wanted, unwanted = rule["includes"], rule["excludes"]
        if _ARCHITECTURE not in wanted.get("arches", [_ARCHITECTURE]) or "minKernel" in wanted:
            continue
        if not set(wanted.get("caps", ())) <= set(capabilities) or set(unwanted.get("caps", ())) & set(capabilities):
            continue
        rules.append({"names": rule["names"], "action": rule["action"], "args": rule["args"] or []})
        if "errnoRet" in rule:
            rules[-1]["errnoRet"] = rule["errnoRet"]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [name for item in profile["archMap"] for name in _names(item)],
        "syscalls": rules,
    }


def _names(item: Mapping[str, Any]) -> list[str]:
    ours = {"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"}.get(_ARCHITECTURE)
    return [item["architecture"], *item["subArchitectures"]] if item["architecture"] == ours else []


def _spec(image: Image, workload: rendering.Manifest, arguments: Sequence[str]) -> dict[str, Any]:
    pod, container = rendering.pod(workload), rendering.container(workload)
    security = pod["securityContext"]
    own = container["securityContext"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["capabilities"] == {"drop": ["ALL"]}
    volumes = [mount["mountPath"] for mount in container["volumeMounts"] if mount["mountPath"] != "/dev/shm"]
    flags = ["nosuid", "noexec", "nodev"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": security["runAsUser"], "gid": security["runAsGroup"]},
            "args": list(arguments),
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "noNewPrivileges": not own["allowPrivilegeEscalation"],
        },
        "root": {"path": image.root, "readonly": own["readOnlyRootFilesystem"]},
        "hostname": image.part,
        "mounts": [
            _mount("/proc", "proc", flags),
            _mount("/dev", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
            _mount("/dev/pts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
            _mount("/dev/shm", "tmpfs", [*flags, "mode=1777", "size=1g"], "shm"),
            _mount("/dev/mqueue", "mqueue", flags),
            _mount("/tmp", "tmpfs", ["nosuid", "nodev", "mode=1777", "size=1g"]),
            *({**_bound(path, Path()), "source": "volume", "options": ["rbind"]} for path in volumes if path != "/tmp"),
        ],
        "linux": {
            # No network of its own: the loopback interface is where the services meet here.
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "seccomp": seccomp(json.loads(SECCOMP.read_text())),
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def _mount(path: str, kind: str, options: Sequence[str], source: str = "") -> dict[str, Any]:
    return {"destination": path, "type": kind, "source": source or kind, "options": list(options)}


def _bound(path: str, source: Path) -> dict[str, Any]:
    return _mount(path, "bind", ["rbind", "ro"], str(source))
