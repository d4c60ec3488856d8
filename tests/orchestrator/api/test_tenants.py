import hashlib
import json
import os
from pathlib import Path

import pytest

from orchestrator.api import tenants
from orchestrator.api.tenants import Tenants
from outrider.errors import InvalidArgument, Unauthenticated

TOKEN, OTHER = "a-long-token", "another-token"
HASHED = "sha256:" + hashlib.sha256(OTHER.encode()).hexdigest()


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(
        tmp_path / "tenants.json",
        {"acme": {"tokens": [TOKEN, "second-token"], "max_streams": 3}, "other": {"tokens": [HASHED]}},
    )


def bearing(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("authorization", f"Bearer {token}")]


def test_a_token_stands_for_its_tenant(path: Path) -> None:
    known = Tenants(path)
    assert [known.of(bearing(token)).name for token in (TOKEN, "second-token", OTHER)] == ["acme", "acme", "other"]
    assert known.of(bearing(TOKEN)).max_streams == 3
    assert known.of(bearing(OTHER)).is_unlimited
    assert known.of([("Authorization", f"bearer {TOKEN} ")]).name == "acme"


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("authorization", "")],
        [("authorization", TOKEN)],
        [("authorization", "Bearer ")],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", f"Bearer {TOKEN}x")],
        [("authorization", f"Bearer {HASHED}")],
        [("authorization", f"Bearer {TOKEN}".encode())],
        bearing(TOKEN) + bearing(OTHER),
    ],
)
def test_fault_45_whoever_shows_no_known_token_is_refused(
    path: Path, metadata: list[tuple[str, str | bytes]] | None
) -> None:
    with pytest.raises(Unauthenticated):
        Tenants(path).of(metadata)


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    tenant = Tenants(None).of(None)
    assert tenant.name == "default"
    assert tenant.is_unlimited


def test_a_changed_file_is_read_anew_and_a_wrong_one_is_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "_RELOAD_INTERVAL_S", 0.0)
    known = Tenants(path)
    write(path, {"acme": {"tokens": ["renewed-token"]}})
    os.utime(path, ns=(1, 1))
    assert known.of(bearing("renewed-token")).name == "acme"
    with pytest.raises(Unauthenticated):
        known.of(bearing(TOKEN))
    write(path, "{")
    os.utime(path, ns=(2, 2))
    assert known.of(bearing("renewed-token")).name == "acme"
    path.unlink()
    assert known.of(bearing("renewed-token")).name == "acme"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "JSON"),
        ([], "object"),
        ({"acme": {"tokens": ["short"]}}, "tokens.0"),
        ({"acme": {"tokens": ["sha256:00"]}}, "64 hexadecimal"),
        ({"acme": {"tokens": ["sha256:zz"]}}, "hexadecimal"),
        ({"acme": {"tokens": [TOKEN], "max_stream": 1}}, "max_stream"),
        ({"acme": {"tokens": [TOKEN], "max_streams": -1}}, "max_streams"),
        ({"acme": {"name": "x", "tokens": [TOKEN]}}, "its key"),
        ({"": {"tokens": [TOKEN]}}, "name"),
        ({"with space": {"tokens": [TOKEN]}}, "name"),
        ({"acme": {"tokens": [TOKEN]}, "other": {"tokens": [TOKEN]}}, "twice"),
    ],
)
def test_a_wrong_file_is_named_at_the_start(tmp_path: Path, content: object, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        Tenants(write(tmp_path / "tenants.json", content))
    assert caught.value.field == "tenants_file"


def test_a_missing_file_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Tenants(tmp_path / "nowhere.json")
