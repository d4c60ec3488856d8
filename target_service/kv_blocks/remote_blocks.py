"""The target's blocks of KV cache in Redis: written behind the passes, fetched for sessions whose cache is not here.

Nothing waits for Redis but a session that is being restored, and that one no longer than computing its tokens would
take. Where Redis is slow, full or gone, blocks are dropped and tokens computed.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.lm.model import BlockSource
from target_service.kv_blocks.costs import RestoreCosts
from target_service.kv_blocks.format import BlockRefused, checked, header, layout_digest
from target_service.kv_blocks.store import BlockStore, BlockStoreError
from target_service.settings import BlockUse

_LOG: Final = logging.getLogger(__name__)
_NUM_READERS: Final = 2
_READ_BYTES: Final = 2 << 20
"""Asked for at once: small enough that a target places one part while the next one comes."""
_WRITE_BYTES: Final = 16 << 20
_REST_S: Final = 5.0
"""After a failure Redis is left alone so long."""
_PROBE_EVERY_S: Final = 60.0
_NUM_PROBED: Final = 4
_PROBE_S: Final = 10.0
_MIN_FETCH_S: Final = 0.05

Deliver = Callable[[list[tuple[bytes, int, Tensor]], bool], None]
"""Gets blocks that were fetched (digest, index, content), and whether they were the last."""


@dataclass(slots=True)
class BlockCounters:
    """What became of blocks since the start.

    Attributes:
        num_written: kept in Redis; those that were there before do not count.
        num_dropped: not written, because Redis is slow, full or gone.
        num_restored: fetched, and in their place.
        num_refused: fetched, but not what they were kept as.
        num_failures: calls that Redis did not answer as it should within the bound.
    """

    num_written: int = 0
    num_dropped: int = 0
    num_restored: int = 0
    num_refused: int = 0
    num_failures: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    digest: bytes
    layout: bytes
    content: Tensor


class _Fetch:
    """A chain of blocks that readers fetch side by side, part by part, until one is missing or the time is over.

    Args:
        parts: in order.
        costs: learn from it.
        bound_s: seconds after which no further part is asked for.

    Attributes:
        num_readers: that work on it.
        costs: see there.
        began_s: when it was made.
    """

    def __init__(self, parts: list[list[tuple[int, bytes]]], costs: RestoreCosts, bound_s: float) -> None:
        self.num_readers = min(_NUM_READERS, len(parts))
        self.costs = costs
        self.began_s = time.monotonic()
        self._parts = deque(parts)
        self._give_up_s = self.began_s + bound_s
        self._num_left = self.num_readers
        self._num_bytes = 0
        self._lock = threading.Lock()

    def next_part(self) -> list[tuple[int, bytes]] | None:
        """Returns what to ask for next; None where there is nothing, or no time."""
        with self._lock:
            return self._parts.popleft() if self._parts and time.monotonic() < self._give_up_s else None

    def end(self) -> None:
        """Has nothing further be asked for."""
        with self._lock:
            self._parts.clear()

    def leave(self, num_bytes: int) -> int | None:
        """A reader is done with so many bytes; returns the bytes of all readers to the last one."""
        with self._lock:
            self._num_left -= 1
            self._num_bytes += num_bytes
            return None if self._num_left else self._num_bytes


class RemoteBlocks:
    """Blocks of one model in one Redis.

    Args:
        source: the model's blocks.
        numerics: names the model and its numerics; see `ModelInfo`.
        store: Redis.
        use: whether to write and restore; `auto` where that is measured to beat computing.
        queue_bytes: blocks that wait to be written, at most.
        secret: seals blocks; see `block_format`.

    Attributes:
        counters: what became of blocks.
        costs: what restoring takes.
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
        self._queue_bytes = queue_bytes
        self._secret = secret
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._num_busy = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._rests_until = 0.0
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="block-reader")
        self._writer = threading.Thread(target=self._run_writer, name="block-writer", daemon=True)
        self._shape = (b"", 0)
        self.counters = BlockCounters()
        self.costs = RestoreCosts()

    @property
    def block_len(self) -> int:
        """Positions of a block."""
        return self._source.block_len

    def start(self) -> None:
        """Looks whether Redis is fit for it, measures what restoring takes, and begins to write."""
        self._source.take_fresh()
        self._look_at_shape()
        try:
            if not self._store.is_bounded():
                _LOG.warning("the Redis for KV blocks has no memory limit with eviction: it will grow until it fails")
        except BlockStoreError as error:
            self._fail(error)
        self._probe()
        self._writer.start()

    def close(self, timeout_s: float = 0.0) -> None:
        """Writes what waits, for so long, and ends."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._writer.is_alive():
            self._writer.join(timeout_s)
        self._store.close()

    def flush(self, timeout_s: float) -> bool:
        """Returns when all that waits is written, or after so long; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._num_busy, timeout_s)

    # In the engine's thread.

    def write_behind(self, compute_s: Callable[[int], float]) -> None:
        """Queues the blocks that have become full, where writing them pays.

        Args:
            compute_s: returns what computing so many tokens takes, in seconds.
        """
        fresh = self._source.take_fresh() if self._pays(1, compute_s(self.block_len)) else ()
        if not fresh:
            return
        layout, _ = self._look_at_shape()
        with self._changed:
            for digest, content in fresh:
                if self._rests or self._queued_bytes + content.numel() > self._queue_bytes:
                    self.counters.num_dropped += 1
                else:
                    self._queued_bytes += content.numel()
                    self._queue.append(_Waiting(digest, layout, content))
            self._changed.notify_all()

    def fetch(self, wanted: Sequence[tuple[int, bytes]], compute_s: float, deliver: Deliver) -> bool:
        """Fetches blocks where that pays, up to the first that is not there.

        Args:
            wanted: index and digest of each, in order.
            compute_s: what computing them would take, in seconds.
            deliver: is called from other threads, at last with True as its second argument. The engine then calls
                `place`.

        Returns:
            Whether they are on their way; if not, nothing is delivered.
        """
        if not wanted or self._rests or self._is_closed or not self._pays(len(wanted), compute_s):
            return False
        layout, block_bytes = self._look_at_shape()
        part_len = max(1, _READ_BYTES // block_bytes)
        parts = [list(wanted[start : start + part_len]) for start in range(0, len(wanted), part_len)]
        fetch = _Fetch(parts, self.costs, max(_MIN_FETCH_S, compute_s))
        for _ in range(fetch.num_readers):
            self._readers.submit(self._run_fetch, fetch, layout, deliver)
        return True

    def restore_s(self, num_blocks: int) -> float:
        """Return about how long restoring so many blocks takes, in seconds; infinite while unknown."""
        return self.costs.restore_s(num_blocks * self._source.block_bytes)

    def place(self, blocks: Sequence[tuple[bytes, int, Tensor]]) -> bool:
        """Puts blocks where sessions find them; returns whether there was room for all."""
        for digest, index, content in blocks:
            # The features that are kept may have changed meanwhile; then nobody looks for it any more.
            if content.numel() != self._source.block_bytes or not self._source.put(digest, index, content):
                return False
            self.counters.num_restored += 1
        return True

    def _pays(self, num_blocks: int, compute_s: float) -> bool:
        if self._use is not BlockUse.AUTO:
            return self._use is BlockUse.ALWAYS
        return self.costs.pays(num_blocks * self._source.block_bytes, compute_s)

    def _look_at_shape(self) -> tuple[bytes, int]:
        """Returns what must agree for blocks to mean the same, and their size; other threads read what it noted."""
        self._shape = (layout_digest(f"{self._numerics} {self._source.layout}"), self._source.block_bytes)
        return self._shape

    # In threads of their own.

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until

    def _fail(self, error: Exception) -> None:
        """Leaves Redis alone for a while. No error ends a thread here: nobody would notice that blocks are dropped."""
        self.counters.num_failures += 1
        if not isinstance(error, BlockStoreError):
            _LOG.error("KV blocks are left alone for a while after an unexpected error", exc_info=error)
        elif not self._rests:
            _LOG.warning("KV blocks are left alone for a while: %s", error)
        self._rests_until = time.monotonic() + _REST_S

    def _run_fetch(self, fetch: _Fetch, layout: bytes, deliver: Deliver) -> None:
        """Works on a fetch beside other readers; the last one to leave says that it is over."""
        num_bytes = 0
        try:
            while (part := fetch.next_part()) is not None and not self._rests:
                asked_s = time.monotonic()
                blocks = self._read(part, layout)
                if not blocks:
                    fetch.costs.observe_answer(time.monotonic() - asked_s)
                deliver(blocks, False)
                num_bytes += sum(content.numel() for _, _, content in blocks)
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

    def _read(self, part: list[tuple[int, bytes]], layout: bytes) -> list[tuple[bytes, int, Tensor]]:
        """Returns the blocks that are there, up to the first that is not, or is not what it should be."""
        blocks = []
        for (index, digest), data in zip(part, self._store.get([digest for _, digest in part]), strict=True):
            if data is None:
                break
            try:
                content = checked(data, digest, layout, self._secret)
            except BlockRefused as error:
                self.counters.num_refused += 1
                _LOG.warning("a KV block is refused and deleted: %s", error)
                self._store.delete([digest])
                break
            blocks.append((digest, index, torch.frombuffer(bytearray(content), dtype=torch.uint8)))
        return blocks

    def _run_writer(self) -> None:
        probed_s = time.monotonic()
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed, _PROBE_EVERY_S)
                batch = self._batch()
                self._num_busy = len(batch)
            if batch:
                self._write(batch)
                with self._changed:
                    self._num_busy = 0
                    self._changed.notify_all()
            if time.monotonic() - probed_s > _PROBE_EVERY_S and not self._is_closed:
                probed_s = time.monotonic()
                self._probe()

    def _batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        num_bytes = 0
        while self._queue and (not batch or num_bytes + self._queue[0].content.numel() <= _WRITE_BYTES):
            batch.append(self._queue.popleft())
            num_bytes += batch[-1].content.numel()
        self._queued_bytes -= num_bytes
        return batch

    def _write(self, batch: list[_Waiting]) -> None:
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
        """Measures what it takes to fetch blocks of this size as sessions' are, with blocks that are nobody's."""
        if self._use is not BlockUse.AUTO or self._rests:
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
                self._rehearse(_Fetch([[part] for part in enumerate(digests)], costs, _PROBE_S), layout)
            self._store.delete(digests)
        except Exception as error:
            self._fail(error)

    def _rehearse(self, fetch: _Fetch, layout: bytes) -> None:
        """Returns when a fetch is over whose blocks nobody wants."""
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
