"""The images of the last build, and a Valkey beside them."""

from collections.abc import Callable, Iterator

import pytest

from k8s.images import PARTS, Image, built
from outrider.local.valkey import EmbeddedValkey

Report = Callable[[str], None]


@pytest.fixture(params=PARTS)
def image(request: pytest.FixtureRequest) -> Image:
    """Each image that was built."""
    return _built(request.param)


@pytest.fixture
def orchestrator() -> Image:
    return _built("orchestrator")


@pytest.fixture
def target() -> Image:
    return _built("target")


@pytest.fixture
def draft() -> Image:
    return _built("draft")


@pytest.fixture
def whole() -> Image:
    return _built("whole")


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Prints a line that `make images` shows."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\nimages: {line}", flush=True)

    return show


def _built(part: str) -> Image:
    found = built()
    assert found, "there are no images: run `make images`"
    if part not in found:
        pytest.skip(f"{part} was not built")
    return found[part]
