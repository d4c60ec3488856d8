"""A Kubernetes cluster of one node, in the namespaces of the process that starts it.

It is for a process that `tests.cluster.isolated` has put into network, mount and process namespaces of its own: nothing
here is put back, because everything is gone with those namespaces. Only cgroups are not, see `CGROUP`.

The daemons see a root file system of their own, which is read-only but for what is mounted over it.
"""

import base64
import json
import os
import shlex
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tests.cluster.archive import PAUSE
from tests.serving.certificates import Authority

CACHE: Final = Path(__file__).parents[2] / ".cache" / "cluster"
PROGRAMS: Final = CACHE / "bin"
RUN: Final = CACHE / "run"
"""What a run writes; it is deleted after it."""
_IMAGES: Final = CACHE / "containerd"
"""The images of earlier runs, unpacked, which takes minutes."""
_IMPORTED: Final = CACHE / "images.json"
CGROUP: Final = "outrider-cluster"
"""Below this cgroup are those of all pods, in each hierarchy."""
CGROUPS: Final = Path("/sys/fs/cgroup")
ADDRESS: Final = "10.90.0.1"
NAME: Final = "node"
_SERVICES: Final = "10.96.0.0/16"
_API: Final = "10.96.0.1"
_PODS: Final = "10.97.0.0/24"
DOMAIN: Final = "cluster.local"
_PORT: Final = 6443
_POD_USER: Final = 10001
_POLL_S: Final = 0.2
_START_S: Final = 120.0
_TAIL_BYTES: Final = 3000
_GATES: Final = "EndpointSliceTerminatingCondition=true"
_ISSUER: Final = f"https://kubernetes.default.svc.{DOMAIN}"
KERNEL_SETTINGS: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""What the kubelet writes although it belongs to the whole machine; here it gets copies."""
_ACCOUNTS: Final = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kubelet": (f"system:node:{NAME}", "system:nodes"),
    "proxy": ("system:kube-proxy", ""),
}
# The kubelet's defaults but for what a node within a node must not do: it changes no setting of the machine, and evicts
# nothing because the machine's disk is rather full.
_KUBELET: Final[dict[str, Any]] = {
    "kind": "KubeletConfiguration",
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "authentication": {
        "anonymous": {"enabled": False},
        "x509": {"clientCAFile": "/run/cluster/certificates/authority.pem"},
    },
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "cgroupRoot": f"/{CGROUP}",
    "clusterDNS": [ADDRESS],
    "clusterDomain": DOMAIN,
    "enforceNodeAllocatable": [],
    "evictionHard": {
        "memory.available": "100Mi",
        "nodefs.available": "1%",
        "imagefs.available": "1%",
        "nodefs.inodesFree": "1%",
    },
    "evictionPressureTransitionPeriod": "10s",
    "failSwapOn": False,
    "imageGCHighThresholdPercent": 100,
    "makeIPTablesUtilChains": False,
    "nodeStatusUpdateFrequency": "5s",
    "resolvConf": "/run/cluster/resolv.conf",
    "tlsCertFile": "/run/cluster/certificates/kubelet.pem",
    "tlsPrivateKeyFile": "/run/cluster/certificates/kubelet.key",
    "volumePluginDir": "/run/cluster/volume-plugins",
}
_PROXY: Final = {
    "kind": "KubeProxyConfiguration",
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "mode": "iptables",
    "clientConnection": {"kubeconfig": "/run/cluster/proxy.kubeconfig"},
    "clusterCIDR": _PODS,
    "hostnameOverride": NAME,
    # Limits of the connection table belong to the whole machine.
    "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    # A pod may be the client of a service whose pod is on the same bridge.
    "iptables": {"masqueradeAll": True},
}
_CONTAINERD: Final = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  sandbox_image = "outrider/pause:local"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/run/cluster/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""
_NETWORK: Final = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": _PODS}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }
    ],
}


class Node:
    """The cluster: its API server, its controllers and its one node, whose DNS is dnsmasq.

    Attributes:
        kubelet_settings: of the kubelet's configuration file; `restart_kubelet` changes some.
    """

    def __init__(self) -> None:
        self.kubelet_settings = dict(_KUBELET)
        self._root = RUN / "root"
        self._state = self._root / "run" / "cluster"
        self._tokens: dict[str, str] = {}
        self._holder: subprocess.Popen[bytes] | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._names = threading.Thread(target=self._serve_names, daemon=True)
        self._authority: Authority | None = None
        self._context: ssl.SSLContext | None = None

    @property
    def _entering(self) -> tuple[str, ...]:
        assert self._holder is not None
        return ("nsenter", f"--target={self._holder.pid}", "--mount")

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self._state / "admin.kubeconfig"

    @property
    def trust(self) -> ssl.SSLContext:
        """Trusts the API server's certificate."""
        assert self._context is not None
        return self._context

    @property
    def url(self) -> str:
        """Of the API server."""
        return f"https://{ADDRESS}:{_PORT}"

    def start(self) -> None:
        """Starts everything; returns when the node is Ready.

        Raises:
            AssertionError: a part does not come up; the message has the end of its log.
        """
        if f"{__package__}.isolated" not in Path("/proc/1/cmdline").read_text():
            raise AssertionError("a node runs in namespaces of its own only: `make cluster` makes them")
        self._make_root()
        self._enter_root()
        self._make_network()
        self._make_cgroups()
        self._write_accounts()
        self._start_control_plane()
        self._start_node()
        self._names.start()
        self.until(self._is_ready, "the node is Ready")

    def close(self) -> None:
        """Ends all daemons and containers. What then remains is ended with the namespaces."""
        for name in reversed(self._processes):
            self.kill(name)

    def kill(self, name: str) -> None:
        """Ends a daemon."""
        process = self._processes[name]
        process.kill()
        process.wait()

    def restart_kubelet(self, **changes: Any) -> None:
        """Starts the kubelet with other settings; pods go on."""
        self.kubelet_settings.update(changes)
        self.kill("kubelet")
        self._start_kubelet()

    def kubectl(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0, is_checked: bool = True) -> str:
        """Runs the kubectl of this version as the administrator; returns what it prints.

        Raises:
            AssertionError: it fails, and `is_checked`.
        """
        done = subprocess.run(
            [PROGRAMS / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PATH": os.defpath, "HOME": str(self._state)},
        )
        if is_checked and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout if is_checked else done.stdout + done.stderr

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = 20.0) -> Any:
        """Calls the API server as the administrator; returns the answer.

        Raises:
            urllib.error.HTTPError: it refuses.
        """
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._tokens['admin']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s, context=self.trust) as response:
            content = response.read()
            return (
                json.loads(content) if response.headers.get_content_type() == "application/json" else content.decode()
            )

    def import_image(self, archive: Path, name: str) -> None:
        """Gives the node the image of an archive, as docker save writes it, unless it has it from a run before.

        Images of archives that are gone are deleted: each build takes gigabytes.
        """
        imported = json.loads(_IMPORTED.read_text()) if _IMPORTED.exists() else {}
        for path in [path for path in imported if not Path(path).exists()]:
            self._in_root("ctr", "--namespace=k8s.io", "images", "remove", "--sync", imported.pop(path)["name"])
        found = archive.stat()
        entry = {"name": name, "stamp": f"{found.st_size} {found.st_mtime_ns}"}
        if imported.get(str(archive)) != entry:
            with archive.open("rb") as content:
                self._in_root("ctr", "--namespace=k8s.io", "images", "import", "-", stdin=content, timeout_s=600)
        _IMPORTED.write_text(json.dumps({**imported, str(archive): entry}))

    def tag_image(self, source: str, name: str) -> None:
        """Gives an image of the node another name too."""
        self._in_root("ctr", "--namespace=k8s.io", "images", "tag", "--force", source, name)

    def issue_certificate(self, name: str) -> tuple[Path, Path]:
        """Issues a certificate of the cluster's authority for the node's address; returns it and its key."""
        assert self._authority is not None
        return self._authority.issue(name, ADDRESS)

    def make_folder(self, path: PurePosixPath) -> None:
        """Makes a folder of the node that belongs to the user of the pods."""
        folder = self._root / path.relative_to("/")
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, _POD_USER, _POD_USER)

    def images(self) -> list[str]:
        """Returns the names of the node's images."""
        return self._in_root("ctr", "--namespace=k8s.io", "images", "list", "--quiet").split()

    def pid_of(self, container: str) -> int:
        """Returns the id of a container's first process."""
        listed = self._in_root("ctr", "--namespace=k8s.io", "tasks", "list")
        return next(int(line.split()[1]) for line in listed.splitlines() if line.startswith(container))

    def until(
        self, is_so: Callable[[], object], what: str, *, within_s: float = _START_S, every_s: float = _POLL_S
    ) -> float:
        """Returns once something is so, and after how many seconds.

        Raises:
            AssertionError: it is not so within this time, or a daemon has ended.
        """
        started = time.monotonic()
        while not is_so():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} has ended; the end of its log:\n{self.log_tail(name)}")
            if time.monotonic() - started > within_s:
                raise AssertionError(f"not so within {within_s:.0f} s: {what}")
            time.sleep(every_s)
        return time.monotonic() - started

    def log_tail(self, name: str, num_bytes: int = _TAIL_BYTES) -> str:
        """Returns the end of a daemon's log."""
        return (RUN / "log" / f"{name}.log").read_bytes()[-num_bytes:].decode(errors="replace")

    def _make_root(self) -> None:
        root = self._root
        for name in ("root", "data", "log"):
            (RUN / name).mkdir(parents=True)
        _run("mount", "--make-rprivate", "/")
        _run("mount", "--bind", CACHE / "node", root)
        _run("mount", "-o", "remount,bind,ro", root)
        for name in ("run", "tmp"):
            _run("mount", "-t", "tmpfs", "-o", "mode=1777" if name == "tmp" else "mode=755", name, root / name)
        _run("mount", "--bind", RUN / "data", root / "var" / "lib")
        _run("mount", "--bind", RUN / "log", root / "var" / "log")
        for folder in (_IMAGES, RUN / "data" / "containerd"):
            folder.mkdir(exist_ok=True)
        _run("mount", "--bind", _IMAGES, root / "var" / "lib" / "containerd")
        _run("mount", "-t", "proc", "proc", root / "proc")
        for name in ("sys", "dev"):
            _run("mount", "--rbind", f"/{name}", root / name)
            _run("mount", "--make-rslave", root / name)
        self._state.mkdir()
        (self._state / "bin").mkdir()
        for program in PROGRAMS.iterdir():
            (self._state / "bin" / program.name).touch()
            _run("mount", "--bind", program, self._state / "bin" / program.name)
        for name in KERNEL_SETTINGS:
            copy = self._state / "kernel" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((root / "proc" / "sys" / name).read_bytes())
            _run("mount", "--bind", copy, root / "proc" / "sys" / name)

    def _enter_root(self) -> None:
        """Makes the mount namespace of the daemons, whose root is the node's.

        A root by chroot would not do: what enters a container from outside sees the root of its mount namespace, which
        would be this machine's.
        """
        script = (
            f"cd {shlex.quote(str(self._root))} && pivot_root . mnt && umount -l /mnt && echo && exec sleep infinity"
        )
        self._holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        if not self._holder.stdout.read(1):
            raise AssertionError("the node's root cannot be entered")
        # So that volumes that the kubelet mounts reach the containers.
        self._in_root("mount", "--make-rshared", "/")

    def _make_network(self) -> None:
        # An address that is not of the loopback, as a node has one. Nothing is connected to this bridge.
        for command in (
            "ip link add node0 type bridge",
            f"ip address add {ADDRESS}/24 dev node0",
            "ip link set node0 up",
            "ip route add default dev node0",
        ):
            self._in_root(*command.split())
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        (self._state / "cni").mkdir()
        (self._state / "cni" / "10-pods.conflist").write_text(json.dumps(_NETWORK))
        (self._state / "hosts").write_text("")
        (self._state / "resolv.conf").write_text(f"nameserver {ADDRESS}\nsearch svc.{DOMAIN} {DOMAIN}\n")
        # Whoever tests from here asks the cluster's DNS too.
        _run("mount", "--bind", self._state / "resolv.conf", Path("/etc/resolv.conf").resolve())
        self._daemon(
            "dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", f"--listen-address={ADDRESS}",
            "--bind-interfaces", "--addn-hosts=/run/cluster/hosts", f"--local=/{DOMAIN}/", "--user=root", "--pid-file",
        )  # fmt: skip

    def _make_cgroups(self) -> None:
        for hierarchy in sorted(CGROUPS.iterdir()):
            if not hierarchy.is_symlink() and (hierarchy / "cgroup.procs").exists():
                made = hierarchy / CGROUP
                made.mkdir(exist_ok=True)
                # As many as the kubelet gives to all pods where their cgroup is not below another one.
                if (made / "cpu.shares").exists():
                    (made / "cpu.shares").write_text(str(1024 * (os.cpu_count() or 1)))
                # Empty in a new one, and then no process may enter it.
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if (made / name).exists() and (hierarchy / "cgroup.clone_children").exists():
                        (made / name).write_text((hierarchy / name).read_text())

    def _write_accounts(self) -> None:
        state = self._state
        self._authority = authority = Authority(state / "certificates")
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}")
        authority.issue("api-server", ADDRESS, "127.0.0.1", _API, "localhost", *names)
        authority.issue("kubelet", ADDRESS, NAME)
        authority.issue("caller", "caller")
        self._context = ssl.create_default_context(cafile=str(authority.file))
        lines = []
        for name, (user, groups) in _ACCOUNTS.items():
            self._tokens[name] = os.urandom(16).hex()
            lines.append(f'{self._tokens[name]},{user},{name},"{groups}"')
            _write_kubeconfig(state / f"{name}.kubeconfig", self.url, authority.file, self._tokens[name])
        (state / "tokens.csv").write_text("\n".join(lines))

    def _start_control_plane(self) -> None:
        certificates = "/run/cluster/certificates"
        self._daemon(
            "etcd", "--data-dir=/var/lib/etcd", "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380",
            # Nothing here outlives a crash.
            "--unsafe-no-fsync",
        )  # fmt: skip
        self._daemon(
            "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={ADDRESS}",
            f"--secure-port={_PORT}", f"--tls-cert-file={certificates}/api-server.pem",
            f"--tls-private-key-file={certificates}/api-server.key", "--cert-dir=/run/cluster",
            f"--client-ca-file={certificates}/authority.pem", "--token-auth-file=/run/cluster/tokens.csv",
            f"--service-account-issuer={_ISSUER}", f"--service-account-signing-key-file={certificates}/api-server.key",
            f"--service-account-key-file={certificates}/api-server.key", f"--service-cluster-ip-range={_SERVICES}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
            "--kubelet-preferred-address-types=InternalIP", f"--kubelet-client-certificate={certificates}/caller.pem",
            f"--kubelet-client-key={certificates}/caller.key",
            f"--kubelet-certificate-authority={certificates}/authority.pem",
            # By these it calls a metrics adapter.
            f"--requestheader-client-ca-file={certificates}/authority.pem", "--requestheader-allowed-names=caller",
            "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={certificates}/caller.pem",
            f"--proxy-client-key-file={certificates}/caller.key", f"--feature-gates={_GATES}",
        )  # fmt: skip
        self.until(self._is_up, "the API server is ready")
        self._daemon(
            "kube-controller-manager", "--kubeconfig=/run/cluster/controller-manager.kubeconfig",
            "--use-service-account-credentials", f"--service-account-private-key-file={certificates}/api-server.key",
            f"--root-ca-file={certificates}/authority.pem", "--leader-elect=false", "--cert-dir=/run/cluster",
            "--horizontal-pod-autoscaler-sync-period=5s", "--horizontal-pod-autoscaler-use-rest-clients=true",
            "--pod-eviction-timeout=60s", f"--feature-gates={_GATES}",
        )  # fmt: skip
        self._daemon(
            "kube-scheduler",
            "--kubeconfig=/run/cluster/scheduler.kubeconfig",
            "--leader-elect=false",
            "--cert-dir=/run/cluster",
        )

    def _start_node(self) -> None:
        (self._state / "containerd.toml").write_text(_CONTAINERD)
        self._start_containerd()
        # Those of a run before, whose processes are gone.
        if stale := self._in_root("ctr", "--namespace=k8s.io", "containers", "list", "--quiet").split():
            self._in_root("ctr", "--namespace=k8s.io", "containers", "delete", *stale)
            self.kill("containerd")
            self._start_containerd()
        self.import_image(CACHE / "base.tar", PAUSE)
        self._start_kubelet()
        (self._state / "proxy.json").write_text(json.dumps(_PROXY))
        self._daemon("kube-proxy", "--config=/run/cluster/proxy.json")

    def _start_containerd(self) -> None:
        self._daemon("containerd", "--config=/run/cluster/containerd.toml")
        self.until(self._has_containerd, "containerd serves")

    def _start_kubelet(self) -> None:
        (self._state / "kubelet.json").write_text(json.dumps(self.kubelet_settings))
        self._daemon(
            "kubelet", "--config=/run/cluster/kubelet.json", "--kubeconfig=/run/cluster/kubelet.kubeconfig",
            "--container-runtime=remote", "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
            f"--node-ip={ADDRESS}", f"--hostname-override={NAME}", "--cert-dir=/run/cluster", "--register-node",
        )  # fmt: skip

    def _is_up(self) -> bool:
        try:
            self.call("GET", "/readyz")
        except OSError:
            return False
        return True

    def _has_containerd(self) -> bool:
        try:
            self._in_root("ctr", "version")
        except AssertionError:
            return False
        return True

    def _is_ready(self) -> bool:
        path = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "nodes", "-o", path, is_checked=False) == "True"

    def _serve_names(self) -> None:
        """Writes the addresses of services for dnsmasq, and again whenever they change."""
        written = ""
        while True:
            time.sleep(0.5)
            try:
                services = self.call("GET", "/api/v1/services")["items"]
                endpoints = self.call("GET", "/api/v1/endpoints")["items"]
            except (OSError, ValueError):
                continue
            text = _hosts(services, endpoints)
            if text != written:
                (self._state / "hosts").write_text(text)
                self._processes["dnsmasq"].send_signal(1)
                written = text

    def _daemon(self, name: str, *arguments: str) -> None:
        command = f"/run/cluster/bin/{name}" if (PROGRAMS / name).exists() else name
        with (RUN / "log" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*self._entering, command, *arguments],
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/run/cluster"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _in_root(self, *command: str, stdin: Any = subprocess.DEVNULL, timeout_s: float = 60.0) -> str:
        done = subprocess.run(
            [*self._entering, *command],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout


def _hosts(services: Sequence[Mapping[str, Any]], endpoints: Sequence[Mapping[str, Any]]) -> str:
    """Returns the lines of a hosts file: a service's own address, or those of its ready pods."""
    pods = {
        (item["metadata"]["namespace"], item["metadata"]["name"]): [
            address["ip"] for subset in item.get("subsets") or () for address in subset.get("addresses") or ()
        ]
        for item in endpoints
    }
    lines = []
    for service in services:
        place = service["metadata"]["namespace"], service["metadata"]["name"]
        address = service["spec"].get("clusterIP", "None")
        for one in sorted(pods.get(place, ())) if address == "None" else [address]:
            lines.append(f"{one} {place[1]}.{place[0]}.svc.{DOMAIN}")
    return "\n".join(sorted(lines)) + "\n"


def _write_kubeconfig(path: Path, url: str, authority: Path, token: str) -> None:
    cluster = {"server": url, "certificate-authority-data": base64.b64encode(authority.read_bytes()).decode()}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "node",
        "contexts": [{"name": "node", "context": {"cluster": "node", "user": "node"}}],
        "clusters": [{"name": "node", "cluster": cluster}],
        "users": [{"name": "node", "user": {"token": token}}],
    }
    path.write_text(json.dumps(config))


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
