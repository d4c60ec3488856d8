import pytest

from outrider.discovery.endpoints import DnsPlace, Endpoint, KubernetesPlace, parse_place
from outrider.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.1:50051", Endpoint("10.0.0.1:50051")),
        ("[::1]:50051", Endpoint("[::1]:50051")),
        ("unix:/run/target.sock", Endpoint("unix:/run/target.sock")),
        ("dns:///target.models.svc:50051", DnsPlace("target.models.svc", 50051)),
        ("kubernetes:///target:grpc", KubernetesPlace("", "target", "grpc")),
        ("kubernetes://models/target:50051", KubernetesPlace("models", "target", "50051")),
    ],
)
def test_places(text: str, place: object) -> None:
    assert parse_place(text, "targets") == place


@pytest.mark.parametrize(
    "text",
    ["target", "dns:///target", "dns:///target:99999", "kubernetes://target:grpc", "http://target:80", "a b:1", ""],
)
def test_a_wrong_place_names_its_setting(text: str) -> None:
    with pytest.raises(InvalidArgument, match="none of host:port") as caught:
        parse_place(text, "drafts")
    assert caught.value.field == "drafts"
