"""Models on the hub, with a hub of this machine that serves files over HTTP."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic

import pytest

NAME = "org/name"
COMMIT = "0" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights"}
CHECK = "from outrider.lm.hub import check_available as run"
DOWNLOAD = "from outrider.lm.hub import local_folder as run"
NOWHERE = "http://127.0.0.1:1"


class Hub(ThreadingHTTPServer):
    """A hub with one model of a few files; `refusal` is the error code of every answer, empty for none."""

    daemon_threads = True
    refusal = ""
    num_calls = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *values: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        self.server.num_calls += 1
        if self.server.refusal:
            self._send(401, b"", {"X-Error-Code": self.server.refusal}, with_body)
        elif "/tree/" in self.path:
            tree = [{"type": "file", "path": name, "size": len(content), "oid": "1"} for name, content in FILES.items()]
            self._send(200, json.dumps(tree).encode(), {}, with_body)
        elif self.path.startswith("/api/"):
            files = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            self._send(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": files}).encode(), {}, with_body)
        else:
            content = FILES.get(self.path.rpartition("/")[2])
            if content is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
                return
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self._send(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT}, with_body)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(program: str, name: str, cache: Path, url: str, **more: str) -> str:
    """Run `run(name)` in a process of its own, which alone can have another hub; return what came of it."""
    whole = f"""
import sys
from outrider.errors import ModelUnsupported
{program}
try:
    print(run(sys.argv[1]))
except ModelUnsupported as error:
    print(error.message)
"""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **more}
    done = subprocess.run(
        [sys.executable, "-c", whole, name], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_hub_that_is_not_reachable_is_tried_once(tmp_path: Path) -> None:
    before = monotonic()
    message = run(CHECK, NAME, tmp_path, NOWHERE)
    assert message.startswith(f"cannot download {NAME}: {NOWHERE} is not reachable (")
    assert f"give a folder, or run `hf download {NAME}`" in message
    assert "\n" not in message
    # The hub's own client waits for more than twenty seconds between its attempts.
    assert monotonic() < before + 15


@pytest.mark.parametrize("name", ["./nope", "/no/such/folder", "a/b/c"])
def test_a_path_is_no_hub_id(name: str, tmp_path: Path) -> None:
    assert run(CHECK, name, tmp_path, NOWHERE) == f"no such folder: {name}"


def test_offline_mode_is_named(tmp_path: Path) -> None:
    message = run(CHECK, NAME, tmp_path, NOWHERE, HF_HUB_OFFLINE="1")
    assert message == f"{NAME} is not in the cache, and HF_HUB_OFFLINE forbids downloads: unset it, or give a folder"


@pytest.mark.parametrize(
    ("refusal", "part"),
    [("RepoNotFound", "and no such model on "), ("GatedRepo", f"{NAME} is gated: accept its terms")],
)
def test_a_refusal_of_the_hub_is_named(hub: Hub, refusal: str, part: str, tmp_path: Path) -> None:
    hub.refusal = refusal
    message = run(CHECK, NAME, tmp_path, hub.url)
    assert part in message and "HF_TOKEN" in message
    # The hub's client reads an answer without a body by a second call.
    assert hub.num_calls <= 2


def test_a_model_is_downloaded_once_and_then_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    folder = Path(run(DOWNLOAD, NAME, tmp_path, hub.url))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert run(CHECK, NAME, tmp_path, NOWHERE) == "None"
    assert Path(run(DOWNLOAD, str(folder), tmp_path, NOWHERE)) == folder
