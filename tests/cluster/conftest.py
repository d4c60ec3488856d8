"""One API server alone for the tests of discovery; one cluster, with one overlay after the other, for all others."""

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import Deployed
from tests.cluster.node import Node
from tests.k8s.rendering import K8S, SERVICES
from tests.orchestrator.conftest import draft, session_store_url, target

__all__ = ["draft", "session_store_url", "target"]

_BUILT: Final = Path(os.environ.get("CLUSTER_IMAGES", ".cache/images/built.json")).resolve()
"""What `make images` has built last."""
_EARLIER: Final = os.environ.get("CLUSTER_EARLIER", "")
"""The same of an earlier version, which `make cluster EARLIER=REF` builds; empty without one."""
_MARKOV: Final = Path(__file__).with_name("markov")
_lines: list[str] = []


@pytest.fixture(scope="session")
async def control_plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    running = ControlPlane(tmp_path_factory.mktemp("control-plane"))
    try:
        await running.create()
        yield running
    finally:
        await running.close()


@pytest.fixture
async def server(control_plane: ControlPlane) -> AsyncIterator[ControlPlane]:
    yield control_plane
    await control_plane.restore()


@pytest.fixture(scope="session")
def say() -> Callable[[str], None]:
    """Keeps a line for the end of the run."""
    return _lines.append


@pytest.fixture(scope="session")
def node(say: Callable[[str], None]) -> Iterator[Node]:
    running = Node()
    try:
        running.start()
        import_built(running, _BUILT, "local")
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def earlier(node: Node) -> str:
    """The tag of an earlier version's images on the node."""
    if not _EARLIER:
        pytest.skip("no earlier version is given, as by `make cluster EARLIER=REF`")
    import_built(node, Path(_EARLIER).resolve(), "earlier")
    return "earlier"


def import_built(node: Node, built: Path, tag: str) -> None:
    """Gives the node the services' images of a build, and each the name that manifests have for it, with this tag."""
    for image in json.loads(built.read_text()):
        # The image with everything is for one machine without a cluster.
        if image["part"] in SERVICES:
            node.import_image(built.parent / image["archive"], image["reference"])
            node.tag_image(image["reference"], f"docker.io/outrider/{image['part']}:{tag}")


@pytest.fixture(scope="session")
def local(node: Node, say: Callable[[str], None]) -> Deployed:
    """The local overlay as it is, with the embedded models; `markov` is applied over it, so its tests come first."""
    deployed = Deployed(node, say)
    deployed.apply(K8S / "overlays" / "local")
    return deployed


@pytest.fixture(scope="session")
def markov(node: Node, say: Callable[[str], None]) -> Deployed:
    """The local overlay with models that start in seconds, two pods of each service."""
    deployed = Deployed(node, say)
    deployed.apply(_MARKOV)
    deployed.scale_to_two()
    return deployed


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps a test's figures for the end of the run."""
    if report.when == "call" and report.user_properties:
        figures = " ".join(f"{name}={value}" for name, value in report.user_properties)
        _lines.append(f"{report.nodeid.rpartition('::')[2]}: {report.outcome} {figures}")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what was converted, what the version cannot take, and the figures of all tests."""
    for line in _lines:
        terminalreporter.write_line(line)
