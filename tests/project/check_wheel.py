"""Installs a built wheel into empty environments, runs it there, and prints what came: `make wheel`.

First alone, as a client of services elsewhere has it; then with the extra `local`, to start every service and complete
a text over HTTP. Nothing of the tree can be imported meanwhile.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

import outrider
from tests.project.distribution import expected_files, files_of, metadata_of

MODEL = "markov:text=1,seed=5"
UP = ("up", "--model", MODEL, "--drafter", "ngram", "--address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")
_READY = "ready; try:"


class Environment:
    """An empty virtual environment, and a working directory without anything of the tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.elsewhere = folder / "elsewhere"
        venv.create(folder, with_pip=True)
        self.elsewhere.mkdir()
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OUTRIDER_"))
        }

    def command(self, name: str, *arguments: str) -> list[str]:
        """Returns the command line of a program in this environment."""
        return [str(self.folder / "bin" / name), *arguments]

    def run(self, name: str, *arguments: str) -> str:
        """Returns what a program prints; ends this one if it fails."""
        done = subprocess.run(
            self.command(name, *arguments), cwd=self.elsewhere, env=self.variables, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise SystemExit(f"wheel: {name} {' '.join(arguments)} ended with {done.returncode}")
        return done.stdout

    def install(self, *requirements: str) -> None:
        """Installs packages."""
        self.run("python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *requirements)


def check_contents(wheel: Path) -> None:
    """Ends this process if the wheel lacks a file of the tree, or has another one."""
    found, expected = files_of(wheel), expected_files()
    if found != expected:
        raise SystemExit(f"wheel: missing {sorted(expected - found)}, not expected {sorted(found - expected)}")
    licenses = sorted(name for name in metadata_of(wheel) if name.startswith("licenses/"))
    print(f"wheel: {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB, {len(found)} files, {', '.join(licenses)}")


def check_alone(wheel: Path) -> None:
    """Checks the command line and the client, without any extra."""
    with tempfile.TemporaryDirectory() as name:
        environment = Environment(Path(name))
        environment.install(str(wheel))
        version = environment.run("outrider", "--version").strip()
        if not version.endswith(outrider.__version__):
            raise SystemExit(f"wheel: outrider --version prints {version!r}, not {outrider.__version__}")
        usage = environment.run("outrider", "--help").splitlines()[0]
        script = "import outrider; print(outrider.Client.__name__, outrider.AsyncClient.__name__, outrider.__file__)"
        imported = environment.run("python", "-c", script).strip()
        if not imported.split()[-1].startswith(name):
            raise SystemExit(f"wheel: imported {imported}, which is not what was installed")
    print(f"wheel: alone: {version}; {usage}; from outrider import {', '.join(imported.split()[:2])}")


def check_whole(wheel: Path, torch: str) -> None:
    """Checks that `outrider up` serves a text over HTTP, and ends with 0 at SIGTERM."""
    with tempfile.TemporaryDirectory() as name:
        environment = Environment(Path(name))
        environment.install(torch)
        environment.install(f"{wheel}[local]")
        with subprocess.Popen(
            environment.command("outrider", *UP),
            cwd=environment.elsewhere,
            env=environment.variables | {"XDG_CACHE_HOME": f"{name}/cache"},
            stdout=subprocess.PIPE,
            text=True,
        ) as stack:
            try:
                text = _completed(_base_url(stack))
            finally:
                stack.send_signal(signal.SIGTERM)
                code = stack.wait(60)
        if code:
            raise SystemExit(f"wheel: outrider up ended with {code}")
    print(f"wheel: outrider {' '.join(UP)}: served {text!r} over HTTP, drained, ended with 0")


def _base_url(stack: "subprocess.Popen[str]") -> str:
    """Returns the URL that `outrider up` prints, once it is ready."""
    url = ""
    for line in stack.stdout or ():
        print(f"wheel:   {line.rstrip()}")
        if found := re.match(r"orchestrator-0 .*(http://\S+)", line):
            url = found[1]
        if line.startswith(_READY):
            return url
    raise SystemExit("wheel: outrider up ended before it was ready")


def _completed(base_url: str) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 16, "seed": 7}
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = json.load(answer)["choices"][0]["text"]
    if not text:
        raise SystemExit("wheel: outrider up served an empty text")
    return str(text)


def main() -> None:
    """Checks the only wheel of a folder."""
    parser = argparse.ArgumentParser(prog="make wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="torch", help="requirement that is installed first")
    given = parser.parse_args()
    (wheel,) = sorted(given.folder.resolve().glob("*.whl"))
    check_contents(wheel)
    check_alone(wheel)
    check_whole(wheel, given.torch)


if __name__ == "__main__":
    sys.exit(main())
