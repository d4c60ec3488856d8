"""A target's blocks of KV cache in Redis: written behind the passes, fetched for sessions whose cache is not here.

Only a session that is being restored waits for Redis, and no longer than computing its tokens would take. Where Redis
is slow, full or gone, blocks are dropped and tokens computed.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.lm.model import BlockSource
from target_service.kv_blocks.costs import RestoreCosts
from target_service.kv_blocks.counters import BlockCounters
from target_service.kv_blocks.fetch import NUM_READERS, Fetch
from target_service.kv_blocks.format import BlockRefused, checked, header, layout_digest
from target_service.kv_blocks.store import BlockStore, BlockStoreError
from target_service.kv_blocks.write_queue import WaitingBlock, WriteQueue
from target_service.settings import BlockUse

_LOG: Final = logging.getLogger(__name__)
_READ_BYTES: Final = 2 << 20
"""Requested at once: small enough that a target places one part while the next one comes."""
_OPEN_CIRCUIT_S: Final = 5.0
"""After a failure Redis is not called for so long."""
_PROBE_EVERY_S: Final = 60.0
_NUM_PROBED: Final = 4
_PROBE_S: Final = 10.0
_MIN_FETCH_S: Final = 0.05

Deliver = Callable[[list[tuple[bytes, Tensor]], bool], None]
"""Takes blocks that were fetched (digest, content), and whether they were the last."""


class RemoteBlocks:
    """Blocks of one model in one Redis.

    Args:
        source: the model's blocks.
        numerics: names the model and its numerics; see `ModelInfo`.
        store: Redis.
        use: whether to write and restore; `auto` where that is measured to be faster than computing.
        queue_bytes: bytes of the blocks that wait to be written, at most.
        secret: seals blocks; see `format`.

    Attributes:
        counters: outcomes of blocks.
        costs: measured time of restoring.
    """

    def __init__(
        self,
        source: BlockSource,
        numerics: str,
        store: BlockStore,
        use: BlockUse,
        queue_bytes: int,
        secret: bytes = b"",
    ) -> None:
        self._source = source
        self._numerics = numerics
        self._store = store
        self._use = use
        self._secret = secret
        self._queue = WriteQueue(queue_bytes)
        self._open_until = 0.0
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="block-reader")
        self._writer = threading.Thread(target=self._run_writer, name="block-writer", daemon=True)
        self._shape = (b"", 0)
        self.counters = BlockCounters()
        self.costs = RestoreCosts()

    @property
    def block_len(self) -> int:
        """Positions of a block."""
        return self._source.block_len

    def start(self) -> None:
        """Check that Redis bounds its memory, measure the time of restoring, and begin to write."""
        self._source.take_fresh()
        self._update_shape()
        try:
            if not self._store.is_bounded():
                _LOG.warning("the Redis for KV blocks has no memory limit with eviction: it will grow until it fails")
        except BlockStoreError as error:
            self._fail(error)
        self._probe()
        self._writer.start()

    def close(self, timeout_s: float = 0.0) -> None:
        """Write the blocks that wait, for so many seconds, and end."""
        self.flush(timeout_s)
        self._queue.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._writer.is_alive():
            self._writer.join(timeout_s)
        self._store.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all blocks are written, or so many seconds have passed; return whether they are."""
        return self._queue.flush(timeout_s)

    # The engine's thread calls the following methods.

    def write_behind(self, compute_s: Callable[[int], float]) -> None:
        """Queue the blocks that have become full, where writing them pays.

        Args:
            compute_s: returns the seconds that computing so many tokens takes.
        """
        fresh = self._source.take_fresh() if self._pays(1, compute_s(self.block_len)) else ()
        if not fresh:
            return
        layout, _ = self._update_shape()
        if self._is_circuit_open:
            self.counters.num_dropped += len(fresh)
        else:
            blocks = [WaitingBlock(digest, layout, content) for digest, content in fresh]
            self.counters.num_dropped += self._queue.put(blocks)

    def fetch(self, wanted: Sequence[tuple[int, bytes]], compute_s: float, deliver: Deliver) -> bool:
        """Fetch blocks where that pays, up to the first that is not there.

        Args:
            wanted: index and digest of each, in order.
            compute_s: seconds that computing them would take.
            deliver: is called from other threads, at last with True as its second argument. The engine then calls
                `place`.

        Returns:
            Whether they are being fetched; if not, nothing is delivered.
        """
        if not wanted or self._is_circuit_open or self._queue.is_closed or not self._pays(len(wanted), compute_s):
            return False
        layout, block_bytes = self._update_shape()
        part_len = max(1, _READ_BYTES // block_bytes)
        parts = [list(wanted[start : start + part_len]) for start in range(0, len(wanted), part_len)]
        fetch = Fetch(parts, self.costs, max(_MIN_FETCH_S, compute_s))
        for _ in range(fetch.num_readers):
            self._readers.submit(self._run_fetch, fetch, layout, deliver)
        return True

    def restore_s(self, num_blocks: int) -> float:
        """Return about how long restoring so many blocks takes, in seconds; infinite while unknown."""
        return self.costs.restore_s(num_blocks * self._source.block_bytes)

    def place(self, blocks: Sequence[tuple[bytes, Tensor]]) -> bool:
        """Put blocks into the prefix cache; return whether there was room for all."""
        for digest, content in blocks:
            # The features that are kept may have changed meanwhile; then no session needs the block any more.
            if content.numel() != self._source.block_bytes or not self._source.put(digest, content):
                return False
            self.counters.num_restored += 1
        return True

    def _pays(self, num_blocks: int, compute_s: float) -> bool:
        if self._use is not BlockUse.AUTO:
            return self._use is BlockUse.ALWAYS
        return self.costs.pays(num_blocks * self._source.block_bytes, compute_s)

    def _update_shape(self) -> tuple[bytes, int]:
        """Return, and store for other threads, the digest of the current layout and the bytes of a block."""
        self._shape = (layout_digest(f"{self._numerics} {self._source.layout}"), self._source.block_bytes)
        return self._shape

    # The reading and writing threads call the following methods.

    @property
    def _is_circuit_open(self) -> bool:
        """Whether Redis failed so recently that it is not called."""
        return time.monotonic() < self._open_until

    def _fail(self, error: Exception) -> None:
        """Open the circuit for a while. No error ends a thread: all later blocks would be dropped without a record."""
        self.counters.num_failures += 1
        if not isinstance(error, BlockStoreError):
            _LOG.error("KV blocks are not used for a while after an unexpected error", exc_info=error)
        elif not self._is_circuit_open:
            _LOG.warning("KV blocks are not used for a while: %s", error)
        self._open_until = time.monotonic() + _OPEN_CIRCUIT_S

    def _run_fetch(self, fetch: Fetch, layout: bytes, deliver: Deliver) -> None:
        """Work on a fetch beside other readers; the last one to leave delivers its end."""
        num_bytes = 0
        try:
            while (part := fetch.next_part()) is not None and not self._is_circuit_open:
                requested_s = time.monotonic()
                blocks = self._read(part, layout)
                if not blocks:
                    fetch.costs.observe_answer(time.monotonic() - requested_s)
                deliver(blocks, False)
                num_bytes += sum(content.numel() for _, content in blocks)
                if len(blocks) < len(part):
                    fetch.end()
        except Exception as error:
            fetch.end()
            self._fail(error)
        finally:
            total = fetch.leave(num_bytes)
            if total is not None:
                fetch.costs.observe_restore(total, time.monotonic() - fetch.began_s)
                deliver([], True)

    def _read(self, part: list[tuple[int, bytes]], layout: bytes) -> list[tuple[bytes, Tensor]]:
        """Return the blocks that are there, up to the first that is missing or refused."""
        blocks = []
        for (_, digest), data in zip(part, self._store.get([digest for _, digest in part]), strict=True):
            if data is None:
                break
            try:
                content = checked(data, digest, layout, self._secret)
            except BlockRefused as error:
                self.counters.num_refused += 1
                _LOG.warning("a KV block is refused and deleted: %s", error)
                self._store.delete([digest])
                break
            blocks.append((digest, torch.frombuffer(bytearray(content), dtype=torch.uint8)))
        return blocks

    def _run_writer(self) -> None:
        probed_s = time.monotonic()
        while not self._queue.is_closed:
            batch = self._queue.take(_PROBE_EVERY_S)
            if batch:
                self._write(batch)
                self._queue.written()
            if time.monotonic() - probed_s > _PROBE_EVERY_S and not self._queue.is_closed:
                probed_s = time.monotonic()
                self._probe()

    def _write(self, batch: list[WaitingBlock]) -> None:
        try:
            contents = [_view(item.content) for item in batch]
            self.counters.num_written += self._store.put(
                [
                    (item.digest, header(item.digest, item.layout, content, self._secret), content)
                    for item, content in zip(batch, contents, strict=True)
                ]
            )
        except Exception as error:
            self.counters.num_dropped += len(batch)
            self._fail(error)

    def _probe(self) -> None:
        """Measure the time of fetching blocks of the size of sessions' blocks, with blocks that no session uses."""
        if self._use is not BlockUse.AUTO or self._is_circuit_open:
            return
        layout, block_bytes = self._shape
        digests = [secrets.token_bytes(32) for _ in range(_NUM_PROBED)]
        content = torch.zeros(block_bytes, dtype=torch.uint8)
        view = _view(content)
        try:
            for _ in range(2):  # the first one may have to connect
                began_s = time.monotonic()
                self._store.get(digests[:1])
            self.costs.observe_answer(time.monotonic() - began_s)
            self._store.put([(digest, header(digest, layout, view, self._secret), view) for digest in digests])
            for costs in (RestoreCosts(), self.costs):  # the first time readers may have to connect
                self._rehearse(Fetch([[part] for part in enumerate(digests)], costs, _PROBE_S), layout)
            self._store.delete(digests)
        except Exception as error:
            self._fail(error)

    def _rehearse(self, fetch: Fetch, layout: bytes) -> None:
        """Run a fetch, and discard its blocks."""
        is_over = threading.Event()

        def deliver(blocks: object, is_last: bool) -> None:
            if is_last:
                is_over.set()

        with contextlib.suppress(RuntimeError):  # closed meanwhile
            for _ in range(fetch.num_readers):
                self._readers.submit(self._run_fetch, fetch, layout, deliver)
            is_over.wait(_PROBE_S)


def _view(content: Tensor) -> memoryview:
    array: NDArray[np.uint8] = content.numpy()
    return array.data
