"""KV blocks between targets: over real sockets, with a real server, and with one that hangs, lies or is gone."""

import asyncio
import hmac
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import torch

from bench.proxy import Link, proxied
from outrider import wire
from outrider.errors import InvalidArgument
from outrider.lm.model import BlockSource
from outrider.local.valkey import EmbeddedValkey
from outrider.parameters import SamplingParameters
from outrider.v1 import target_pb2 as pb
from target_service.engine.engine import Engine
from target_service.kv_blocks.format import HEADER_BYTES
from target_service.kv_blocks.remote_blocks import RemoteBlocks
from target_service.kv_blocks.store import BlockStore
from target_service.own_engine import kv_blocks_secret
from target_service.settings import BlockUse, TargetSettings
from tests.lm.models import CONFIGS, save_model
from tests.target_service.conversation import Caller, target

PROMPT = [3 + 7 * index % 60 for index in range(200)]
NUM_BLOCKS = len(PROMPT) // 32
SAMPLED = SamplingParameters(seed=4, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(CONFIGS["llama"], tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches may take long: a busy machine must not be taken for a slow server."""
    monkeypatch.setattr("target_service.kv_blocks.remote_blocks._MIN_FETCH_S", 10.0)


@pytest.fixture
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(durable=False, max_memory_bytes=64 << 20, evicts=True) as running:
        yield running


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("what all targets of a fleet share\n")
    return file


def settings(server: EmbeddedValkey, **more: object) -> dict[str, object]:
    return {"kv_blocks_url": server.url, "kv_blocks": BlockUse.ALWAYS, "kv_budget_bytes": 1 << 24, **more}


def blocks_of(engine: Engine) -> RemoteBlocks:
    assert engine.blocks is not None
    return engine.blocks


def keys(server: EmbeddedValkey) -> list[bytes]:
    with redis.Redis.from_url(server.url) as client:
        return list(client.scan_iter("outrider:kv:*"))


async def plain(caller: Caller, handle: int = 1, prompt: list[int] | None = None, **more: object) -> list[int]:
    return await caller.plain(handle, prompt or PROMPT, SAMPLED, stop_token_ids=(), **more)


async def test_a_session_that_moves_is_restored_to_the_same_bits(
    folder: str, server: EmbeddedValkey, secret_file: Path
) -> None:
    shared = settings(server, kv_blocks_secret_file=secret_file)
    async with target(folder, kv_budget_bytes=1 << 24) as (engine, caller):
        assert engine.blocks is None
        truth = await plain(caller)
    async with target(folder, **shared) as (engine, caller):
        assert await plain(caller) == truth
        assert blocks_of(engine).flush(5)
        num_written = blocks_of(engine).counters.num_written
        assert num_written == (len(PROMPT) + len(truth)) // 32 == len(keys(server))
    async with target(folder, **shared) as (engine, caller):
        # A session in the middle of its output moves here: what is there is restored, the rest is run.
        assert await plain(caller) == truth
        assert blocks_of(engine).counters.num_restored == NUM_BLOCKS
        assert engine.load.num_tokens == len(PROMPT) - 32 * NUM_BLOCKS + len(truth) - 1
        # Another session with the same beginning finds it here, without Redis.
        assert await plain(caller, 2, [*PROMPT, 5]) != truth
        assert blocks_of(engine).counters.num_restored == NUM_BLOCKS


async def test_another_tenant_restores_nothing(folder: str, server: EmbeddedValkey) -> None:
    async with target(folder, **settings(server)) as (engine, caller):
        await plain(caller, cache_salt=b"one")
        blocks_of(engine).flush(5)
    async with target(folder, **settings(server)) as (engine, caller):
        await plain(caller, 1, cache_salt=b"two")
        assert blocks_of(engine).counters.num_restored == 0
        await plain(caller, 2, cache_salt=b"one")
        assert blocks_of(engine).counters.num_restored == NUM_BLOCKS


async def test_features_are_restored_with_it(folder: str, server: EmbeddedValkey) -> None:
    async def given() -> tuple[bytes, int]:
        async with target(folder, **settings(server)) as (engine, caller):
            caller.position_bytes = 2 * 2 * 32
            message = pb.VerifyOpen(
                session_id="s",
                fencing_token=1,
                prompt_len=len(PROMPT),
                committed_len=len(PROMPT),
                window_end=len(PROMPT) + 1,
                parameters=wire.parameters_to_message(SamplingParameters(temperature=0, max_tokens=5)),
                feature_layers=(1, 3),
            )
            await caller.send(1, open=message)
            await caller.receive(1)
            await caller.send(1, features=pb.FeatureRequest(layers=(1, 3)))
            await caller.span(1, 0, PROMPT)
            data = await caller.features(1, len(PROMPT))
            blocks_of(engine).flush(5)
            return data, engine.load.num_tokens

    data, num_tokens = await given()
    again, num_left = await given()
    assert again == data
    assert num_tokens == len(PROMPT)
    assert num_left == len(PROMPT) - 32 * NUM_BLOCKS


def overwrite(server: EmbeddedValkey, change: Callable[[bytes], bytes]) -> None:
    with redis.Redis.from_url(server.url) as client:
        for key in client.scan_iter("outrider:kv:*"):
            value = client.get(key)
            assert isinstance(value, bytes)
            client.set(key, change(value))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda value: value[:-1] + bytes([value[-1] ^ 1]), id="flipped-bit"),
        pytest.param(lambda value: value[:1000], id="cut-off"),
        pytest.param(lambda value: b"not a block", id="nonsense"),
        pytest.param(lambda value: b"", id="empty"),
    ],
)
async def test_fault_28_a_poisoned_block_is_refused(
    folder: str, server: EmbeddedValkey, change: Callable[[bytes], bytes]
) -> None:
    async with target(folder, **settings(server)) as (engine, caller):
        truth = await plain(caller)
        blocks_of(engine).flush(5)
    overwrite(server, change)
    async with target(folder, **settings(server)) as (engine, caller):
        assert await plain(caller) == truth
        counters = blocks_of(engine).counters
        # Each reader stops at the first one that it meets.
        assert 1 <= counters.num_refused <= 2
        assert counters.num_restored == 0
        assert blocks_of(engine).flush(5)
        # Those were deleted, and written anew once they had been computed.
        assert counters.num_written == counters.num_refused


def resealed(value: bytes, secret: bytes) -> bytes:
    """Returns a block with one byte changed, and its seal made anew as the format has it."""
    label, content = value[: HEADER_BYTES - 32], bytes([value[HEADER_BYTES] ^ 1]) + value[HEADER_BYTES + 1 :]
    return label + hmac.digest(secret, label + content, "sha256") + content


async def test_attack_13_blocks_that_were_changed_and_sealed_anew_are_refused(
    folder: str, server: EmbeddedValkey, secret_file: Path
) -> None:
    async with target(folder, **settings(server, kv_blocks_secret_file=secret_file)) as (engine, caller):
        truth = await plain(caller)
        assert blocks_of(engine).flush(5)
    forged_with = itertools.cycle([b"", b"what another fleet has"])
    overwrite(server, lambda value: resealed(value, next(forged_with)))
    async with target(folder, **settings(server, kv_blocks_secret_file=secret_file)) as (engine, caller):
        assert await plain(caller) == truth
        assert blocks_of(engine).counters.num_refused >= 1
        assert blocks_of(engine).counters.num_restored == 0


@pytest.mark.parametrize(("content", "problem"), [(None, "cannot be read"), ("short\n", "5 bytes")])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgument, match=problem) as caught:
        kv_blocks_secret(TargetSettings(kv_blocks_secret_file=file))
    assert caught.value.field == "kv_blocks_secret_file"


async def test_fault_28_a_block_under_anothers_key_is_refused(folder: str, server: EmbeddedValkey) -> None:
    async with target(folder, **settings(server)) as (engine, caller):
        truth = await plain(caller)
        blocks_of(engine).flush(5)
    with redis.Redis.from_url(server.url) as client:
        values = [client.get(key) for key in keys(server)]
        for key, value in zip(keys(server), values[1:] + values[:1], strict=True):
            assert isinstance(value, bytes)
            client.set(key, value)
    async with target(folder, **settings(server)) as (engine, caller):
        assert await plain(caller) == truth
        assert 1 <= blocks_of(engine).counters.num_refused <= 2


async def test_fault_26_a_server_that_hangs_holds_nobody_up_for_long(folder: str, server: EmbeddedValkey) -> None:
    async with target(folder, **settings(server)) as (engine, caller):
        truth = await plain(caller)
        blocks_of(engine).flush(5)
    async with target(folder, **settings(server, kv_blocks_timeout_s=0.3)) as (engine, caller):
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert await plain(caller) == truth
            assert time.monotonic() - began < 5
            assert blocks_of(engine).counters.num_failures >= 1
            # The circuit is open for a while: the next session does not wait at all.
            assert await plain(caller, 2, PROMPT[1:])
            assert blocks_of(engine).counters.num_dropped > 0
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_fault_20_a_server_that_is_not_there_changes_nothing(folder: str, server: EmbeddedValkey) -> None:
    server.stop()
    async with target(folder, **settings(server, kv_blocks=BlockUse.AUTO)) as (engine, caller):
        assert len(await plain(caller)) == 40
        assert blocks_of(engine).costs.bytes_per_s == 0


class Large:
    """A source of large blocks; nothing is in them."""

    layout, block_len, block_bytes = "large", 32, 1 << 20

    def take_fresh(self) -> list[tuple[bytes, torch.Tensor]]:
        return []

    def put(self, digest: bytes, content: torch.Tensor) -> bool:
        return True


async def test_what_is_measured_at_start_is_what_readers_reach_together(server: EmbeddedValkey) -> None:
    """Where a connection is the bottleneck two of them are twice as fast, and so are sessions' fetches."""
    async with proxied(server.address) as proxy:
        proxy.down = Link(bytes_per_s=2.5e6)
        store = BlockStore(server.url_by(proxy.address), timeout_s=5, ttl_s=60)
        blocks = RemoteBlocks(Large(), "numerics", store, BlockUse.AUTO, 1 << 20)
        await asyncio.to_thread(blocks.start)
        assert 3.75e6 < blocks.costs.bytes_per_s < 6.25e6
        assert blocks.counters.num_restored == 0 == len(keys(server))
        await asyncio.to_thread(blocks.close, 5)


async def test_auto_measures_at_start_and_restores_only_where_that_is_faster(
    folder: str, server: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with target(folder, **settings(server, kv_blocks=BlockUse.AUTO)) as (engine, caller):
        costs = blocks_of(engine).costs
        assert costs.bytes_per_s > 0
        assert len(keys(server)) == 0  # what was measured with is gone again
        # So tiny a model computes a block faster than any server gives it back.
        monkeypatch.setattr(costs, "restore_s", lambda num_bytes: 100.0)
        truth = await plain(caller)
        blocks_of(engine).flush(5)
        assert len(keys(server)) == 0
        # Less than nothing: on a busy machine what computing takes was measured as nothing.
        monkeypatch.setattr(costs, "restore_s", lambda num_bytes: -1.0)
        await plain(caller, 2, PROMPT[5:])
        blocks_of(engine).flush(5)
        assert len(keys(server)) > 0
    async with target(folder, **settings(server, kv_blocks=BlockUse.AUTO)) as (engine, caller):
        monkeypatch.setattr(blocks_of(engine).costs, "restore_s", lambda num_bytes: -1.0)
        await plain(caller, 2, PROMPT[5:])
        assert blocks_of(engine).counters.num_restored == (len(PROMPT) - 5) // 32
        monkeypatch.setattr(blocks_of(engine).costs, "restore_s", lambda num_bytes: 100.0)
        assert await plain(caller, 1) == truth
        assert blocks_of(engine).counters.num_restored == (len(PROMPT) - 5) // 32


class Source:
    """Blocks that a model has finished; there is room for two restored ones."""

    layout = "a layout"
    block_len = 4
    block_bytes = 100

    def __init__(self) -> None:
        self.fresh: list[tuple[bytes, torch.Tensor]] = []
        self.num_restored = 0

    def take_fresh(self) -> list[tuple[bytes, torch.Tensor]]:
        fresh, self.fresh = self.fresh, []
        return fresh

    def put(self, digest: bytes, content: torch.Tensor) -> bool:
        self.num_restored += 1
        return self.num_restored <= 2


def remote(source: BlockSource, server: EmbeddedValkey, queue_bytes: int) -> RemoteBlocks:
    store = BlockStore(server.url, timeout_s=0.3, ttl_s=100)
    return RemoteBlocks(source, "numerics", store, BlockUse.ALWAYS, queue_bytes)


def new_blocks(num: int) -> list[tuple[bytes, torch.Tensor]]:
    return [(bytes([number]) * 32, torch.full((100,), number, dtype=torch.uint8)) for number in range(num)]


def test_the_queue_is_bounded_and_what_does_not_fit_is_dropped(server: EmbeddedValkey) -> None:
    source = Source()
    blocks = remote(source, server, queue_bytes=350)
    blocks.start()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        source.fresh = new_blocks(20)
        blocks.write_behind(lambda num_tokens: 1.0)
        assert blocks.counters.num_dropped == 17
        assert not blocks.flush(0.05)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    blocks.close(5)
    assert len(keys(server)) <= 3


def test_an_unexpected_error_ends_neither_writing_nor_restoring(
    server: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("target_service.kv_blocks.remote_blocks._OPEN_CIRCUIT_S", 0.0)
    source = Source()
    blocks = remote(source, server, queue_bytes=10_000)
    blocks.start()
    # Its bytes cannot be had: the error is torch's, which nobody expects of a block.
    source.fresh = [(b"1" * 32, torch.zeros(100, requires_grad=True))]
    blocks.write_behind(lambda num_tokens: 1.0)
    assert blocks.flush(5)
    assert blocks.counters.num_dropped == blocks.counters.num_failures == 1
    assert len([record for record in caplog.records if record.exc_info]) == 1
    source.fresh = new_blocks(3)
    blocks.write_behind(lambda num_tokens: 1.0)
    assert blocks.flush(5)
    assert blocks.counters.num_written == len(keys(server)) == 3

    over = threading.Event()

    def fail_first(part: list[tuple[bytes, int, torch.Tensor]], is_last: bool) -> None:
        if is_last:
            over.set()
        elif blocks.counters.num_failures == 1:
            raise RuntimeError("of whoever gets the blocks")

    for num_failures in (2, 2):
        over.clear()
        assert blocks.fetch([(0, bytes([0]) * 32)], 1.0, fail_first)
        assert over.wait(5)
        assert blocks.counters.num_failures == num_failures
    blocks.close(5)


def test_room_that_is_missing_ends_a_restoration(server: EmbeddedValkey) -> None:
    blocks = remote(Source(), server, queue_bytes=10_000)
    blocks.start()
    assert blocks.place([(b"1" * 32, torch.zeros(100)), (b"2" * 32, torch.zeros(100))])
    assert not blocks.place([(b"3" * 32, torch.zeros(100))])
    assert not blocks.place([(b"4" * 32, torch.zeros(99))])  # other features are kept by now
    assert blocks.counters.num_restored == 2
    blocks.close(1)
    assert not blocks.fetch([(0, b"1" * 32)], 1.0, lambda *part: None)
