"""What a caller may try at the HTTP address of metrics."""

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from outrider.serving.metrics import MetricsServer
from outrider.serving.metrics_http import MAX_CONNECTIONS, MetricsHTTPServer

NUM_HELD = 100
HALF = b"GET /metrics HTTP/1.1\r\nHost: a\r\nX: "


def until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def counted() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("outrider_counted", "Counted.", registry=registry).inc(3)
    return registry


def read(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        data: bytes = response.read()
        return data


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def holding(address: str, num: int) -> Iterator[list[socket.socket]]:
    """Opens connections that send half a request."""
    host, _, port = address.rpartition(":")
    with ExitStack() as exits:
        held = [exits.enter_context(socket.create_connection((host, int(port)), timeout=5)) for _ in range(num)]
        for connection in held:
            try:
                connection.sendall(HALF)
            except OSError:  # ended already
                continue
        yield held


def test_attack_16_half_sent_requests_hold_few_threads_and_descriptors() -> None:
    server = MetricsServer("127.0.0.1:0", counted())
    address = server.start()
    threads, descriptors = threading.active_count(), num_descriptors()
    try:
        with holding(address, NUM_HELD):
            until(lambda: threading.active_count() <= threads + MAX_CONNECTIONS)
            until(lambda: num_descriptors() <= descriptors + NUM_HELD + MAX_CONNECTIONS)
            # Whoever asks is served all the same.
            for _ in range(3):
                assert b"outrider_counted_total 3.0" in read(address)
        # What an earlier test left in this process may have been closed meanwhile, too.
        until(lambda: threading.active_count() <= threads)
        until(lambda: num_descriptors() <= descriptors)
    finally:
        server.close()


def test_attack_16_a_connection_without_progress_ends() -> None:
    server = MetricsHTTPServer("127.0.0.1", 0, counted(), timeout_s=0.1)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with holding(f"127.0.0.1:{server.server_port}", 3) as held:
            # They are still open here: the server has ended them.
            assert [connection.recv(1) for connection in held] == [b"", b"", b""]
        assert b"outrider_counted_total" in read(f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
