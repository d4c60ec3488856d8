"""Where tests write kustomizations."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.rendering import K8S


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Yields a folder below `k8s`: kustomize takes nothing from outside."""
    folder = Path(tempfile.mkdtemp(dir=K8S, prefix=".test-"))
    yield folder
    shutil.rmtree(folder)
