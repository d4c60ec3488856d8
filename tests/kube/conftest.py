"""One control plane for all tests; what a test has changed of it is put back before the next one."""

from collections.abc import AsyncIterator

import pytest

from tests.kube.control_plane import ControlPlane
from tests.orchestrator.conftest import draft, session_store_url, target

__all__ = ["draft", "session_store_url", "target"]


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
