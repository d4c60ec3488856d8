import socket
from collections.abc import Iterator

import pytest

from outrider.errors import InvalidArgument, Unavailable
from outrider.local.listening import check_address, check_free, chosen_addresses, reachable


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", ":8000", "127.0.0.1:http", "127.0.0.1:65536", "127.0.0.1:8000++"]
)
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^http_address: .*HOST:PORT") as caught:
        check_address(address, "http_address")
    assert caught.value.field == "http_address"


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:8000+", "[::]:8000+"])
def test_several_processes_share_an_address_that_is_none_of_one(address: str) -> None:
    check_address(address, "address", 3)


def test_one_port_is_not_for_several_processes() -> None:
    check_address("127.0.0.1:8000", "address")
    with pytest.raises(InvalidArgument, match=r"one address for 2 processes; 127\.0\.0\.1:8000\+ takes the next"):
        check_address("127.0.0.1:8000", "address", 2)


def test_the_next_free_ports_are_chosen(taken: int) -> None:
    first, second = chosen_addresses(f"127.0.0.1:{taken}+", 2, [f"127.0.0.1:{taken + 1}"])
    assert taken + 1 < int(first.partition(":")[2]) < int(second.partition(":")[2])
    check_free(first)


def test_a_taken_port_is_an_error_where_it_was_demanded(taken: int) -> None:
    with pytest.raises(Unavailable, match=rf"cannot listen on 127\.0\.0\.1:{taken}: the port is taken"):
        check_free(f"127.0.0.1:{taken}")
    check_free(f"127.0.0.1:{taken}+")
    check_free("127.0.0.1:0")


def test_a_host_of_another_machine_is_an_error() -> None:
    with pytest.raises(Unavailable, match=r"cannot listen on 192\.0\.2\.1:8000: "):
        check_free("192.0.2.1:8000")


def test_clients_get_the_loopback_of_a_service_on_all_hosts() -> None:
    assert reachable("0.0.0.0:8000") == "127.0.0.1:8000"
    assert reachable("[::]:8000") == "[::1]:8000"
    assert reachable("10.0.0.7:8000") == "10.0.0.7:8000"
    assert reachable("unix:/run/outrider") == "unix:/run/outrider"
    assert reachable("") == ""
