"""Blocks in a real server, and what happens without one."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.local.valkey import EmbeddedValkey
from target_service.kv_blocks.store import BlockStore, BlockStoreError
from tests.serving.certificates import Authority
from tests.serving.tls_front import tls_front

FIRST, SECOND, THIRD = (bytes([number]) * 32 for number in range(3))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(durable=False, max_memory_bytes=64 << 20, evicts=True) as running:
        yield running


@pytest.fixture
def store(server: EmbeddedValkey) -> Iterator[BlockStore]:
    store = BlockStore(server.url, timeout_s=0.3, ttl_s=100)
    store.delete([FIRST, SECOND, THIRD])
    yield store
    store.close()


def test_blocks_come_back_and_only_new_ones_are_written(store: BlockStore) -> None:
    content = memoryview(b"content" * 1000)
    assert store.put([(FIRST, b"head", content), (SECOND, b"head", content)]) == 2
    assert store.put([(FIRST, b"other", content), (THIRD, b"", content)]) == 1
    assert store.get([FIRST, THIRD]) == [b"head" + bytes(content), bytes(content)]
    store.delete([FIRST])
    assert store.get([FIRST, SECOND]) == [None, b"head" + bytes(content)]


def test_what_is_used_stays_longer(server: EmbeddedValkey, store: BlockStore) -> None:
    short = BlockStore(server.url, timeout_s=0.3, ttl_s=1)
    short.put([(FIRST, b"", memoryview(b"a")), (SECOND, b"", memoryview(b"b")), (THIRD, b"", memoryview(b"c"))])
    assert store.get([FIRST]) == [b"a"]
    assert store.put([(SECOND, b"", memoryview(b"b"))]) == 0
    give_up = time.monotonic() + 10
    while store_has(server, THIRD):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert store.get([FIRST, SECOND, THIRD]) == [b"a", b"b", None]
    short.close()


def store_has(server: EmbeddedValkey, digest: bytes) -> bool:
    import redis

    with redis.Redis.from_url(server.url) as client:
        return bool(client.exists(b"outrider:kv:" + digest.hex().encode()))


def test_a_server_without_a_bound_is_recognised(store: BlockStore) -> None:
    assert store.is_bounded()
    with EmbeddedValkey(durable=False) as unbounded:
        other = BlockStore(unbounded.url, timeout_s=1, ttl_s=10)
        assert not other.is_bounded()
        other.close()


def test_a_server_that_hangs_or_is_gone_is_an_error_within_the_bound() -> None:
    with EmbeddedValkey(durable=False) as server:
        store = BlockStore(server.url, timeout_s=0.3, ttl_s=10)
        store.put([(FIRST, b"", memoryview(b"a"))])
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        for call in (lambda: store.get([FIRST]), lambda: store.put([(SECOND, b"", memoryview(b"b"))])):
            with pytest.raises(BlockStoreError):
                call()
        assert time.monotonic() - began < 3
        os.kill(server.pid, signal.SIGCONT)
        assert store.get([FIRST]) == [b"a"]
    for call in (lambda: store.get([FIRST]), lambda: store.delete([FIRST]), store.is_bounded):
        with pytest.raises(BlockStoreError):
            call()
    store.close()


def test_a_server_without_room_is_an_error(server: EmbeddedValkey) -> None:
    with EmbeddedValkey(durable=False, max_memory_bytes=4 << 20) as full:
        store = BlockStore(full.url, timeout_s=1, ttl_s=100)
        content = memoryview(bytes(1 << 20))
        with pytest.raises(BlockStoreError, match="memory"):
            for number in range(8):
                store.put([(bytes([number]) * 32, b"", content)])
        store.close()


def test_tls_trusts_the_authority_that_the_url_names(server: EmbeddedValkey, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "right"), Authority(tmp_path / "wrong")
    with tls_front(server.port, *authority.issue("redis")) as port:
        start = server.url.replace("redis:", "rediss:").replace(server.address, f"localhost:{port}")
        store = BlockStore(f"{start}?ssl_ca_certs={authority.file}", timeout_s=5, ttl_s=10)
        store.put([(FIRST, b"", memoryview(b"a"))])
        assert store.get([FIRST]) == [b"a"]
        store.close()
        stranger = BlockStore(f"{start}?ssl_ca_certs={other.file}", timeout_s=5, ttl_s=10)
        with pytest.raises(BlockStoreError, match="certificate verify failed"):
            stranger.get([FIRST])
        stranger.close()
