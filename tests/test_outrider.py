"""The package's own names: all there, lazily, and none a type checker would miss."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import outrider
from outrider import client

EXAMPLE = """
from outrider import AsyncClient, Client, LocalStack, SamplingParameters, Speculation, StackOptions, errors
from outrider.client import LocalStack as Same, OutriderClient, SyncClient
assert (OutriderClient, SyncClient, Same) == (AsyncClient, Client, LocalStack)
"""


@pytest.mark.parametrize("name", outrider.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(outrider, name) is not None
    assert name in dir(outrider)


def test_the_client_has_the_same_names() -> None:
    missing = set(client.__all__) - set(outrider.__all__)
    assert missing == {"OutriderClient", "SyncClient"}, "the earlier names stay where they were"


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'outrider' has no attribute 'Clinet'"):
        _ = outrider.Clinet  # type: ignore[attr-defined]


def test_type_checkers_see_every_name() -> None:
    seen = inspect.getsource(outrider).partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    for name in outrider.__all__:
        assert f" {name}" in seen, name


def test_names_are_imported_when_they_are_used() -> None:
    imports = (
        "import sys, outrider; sys.exit(any(name.partition('.')[0] in ('grpc', 'google') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", imports], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", EXAMPLE], check=False).returncode == 0


def test_the_package_is_typed() -> None:
    assert (Path(outrider.__file__).parent / "py.typed").exists()
