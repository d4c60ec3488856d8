import pytest

from orchestrator.election.election import parse_lease
from outrider.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "lease"),
    [
        ("redis", None),
        ("kubernetes:///house", ("", "house")),
        ("kubernetes://models/outrider-orchestrator", ("models", "outrider-orchestrator")),
    ],
)
def test_says_where_the_election_is(text: str, lease: tuple[str, str] | None) -> None:
    assert parse_lease(text) == lease


@pytest.mark.parametrize(
    "text", ["", "Redis", "kubernetes://house", "kubernetes:///", "kubernetes:///a/b", "redis://x"]
)
def test_refuses_anything_else(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_lease(text)
    assert caught.value.field == "housekeeping_lease"
