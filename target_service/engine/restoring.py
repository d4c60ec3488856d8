"""Restoring sessions' KV cache from Redis before they run, where that takes less time than computing it."""

import functools
import secrets
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import torch

from outrider.control.pass_times import PassTimes
from outrider.lm.model import LanguageModel, SessionStep
from outrider.tokens import TokenSpan
from target_service.engine.request import Request
from target_service.kv_blocks.remote_blocks import RemoteBlocks

_PART_LEN: Final = 128
_MEASURED_LEN: Final = 512
"""Long enough that the cost of attention shows."""
_NUM_PARTS: Final = 4
"""What is measured has at least so many parts of a pass, one of which a row that decodes takes, too."""
_NUM_RUNS: Final = 3
_REFRESH_LEN: Final = 64
_FRESH_S: Final = 1.0
_CLEAR_RATIO: Final = 6.0
_MIN_REFRESHED: Final = 10
"""The prefill speed is measured anew, by a prompt of `_REFRESH_LEN` rows, where the last pass is longer ago than
`_FRESH_S` (another process may have come or gone), where computing and restoring differ by less than `_CLEAR_RATIO`,
and where the missing blocks have `_MIN_REFRESHED` times as many rows."""


class Restoring:
    """Fetches the KV blocks that requests lack, where that pays. All methods run in the engine's thread.

    Args:
        model: the model.
        blocks: the blocks in Redis.
        times: of the model's passes.
        run_in_engine: has the engine's thread call a function; from any thread.
        is_open: returns whether a request has not been closed.
    """

    def __init__(
        self,
        model: LanguageModel,
        blocks: RemoteBlocks,
        times: PassTimes,
        run_in_engine: Callable[[Callable[[], object]], None],
        is_open: Callable[[Request], bool],
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._times = times
        self._run_in_engine = run_in_engine
        self._is_open = is_open
        self._last_pass_s = 0.0

    def begin(self, request: Request) -> None:
        """Fetch the missing blocks of a session's KV cache, if that pays; until then the request does not run."""
        if request.is_restoring or not request.has_start:
            return
        resident, block_len = request.resident, self._blocks.block_len
        absent = resident.cache.absent(resident.token_ids)
        if absent:
            num_rows, start = len(absent) * block_len, absent[0][0] * block_len
            if num_rows >= _MIN_REFRESHED * _REFRESH_LEN and self._needs_fresh_speed(num_rows, start, len(absent)):
                self._refresh_speed()
            compute_s = self._times.prefill_s(num_rows, start)
            request.is_restoring = self._blocks.fetch(absent, compute_s, functools.partial(self._on_blocks, request))

    def write_behind(self) -> None:
        """Queue the blocks that the last pass completed to be written, if that pays."""
        self._last_pass_s = time.monotonic()
        self._blocks.write_behind(lambda num_tokens: self._times.prefill_s(num_tokens, 0))

    def _needs_fresh_speed(self, num_rows: int, start: int, num_blocks: int) -> bool:
        compute_s, restore_s = self._times.prefill_s(num_rows, start), self._blocks.restore_s(num_blocks)
        is_close = compute_s < inf and restore_s / _CLEAR_RATIO < compute_s < restore_s * _CLEAR_RATIO
        return is_close and time.monotonic() - self._last_pass_s > _FRESH_S

    def _refresh_speed(self) -> None:
        """Measure a short prompt; where no pass has run lately, no other session waits for it."""
        num_rows = max(_REFRESH_LEN, _NUM_PARTS * self._model.info.part_rows)
        [duration_s] = _run_passes(self._model, [num_rows])
        self._times.reset_prefill_speed(duration_s, num_rows)
        self._last_pass_s = time.monotonic()

    def _on_blocks(self, request: Request, blocks: list[tuple[bytes, torch.Tensor]], is_last: bool) -> None:
        """Pass blocks on from the thread that read them."""
        self._run_in_engine(functools.partial(self._place, request, blocks, is_last))

    def _place(self, request: Request, blocks: list[tuple[bytes, torch.Tensor]], is_last: bool) -> None:
        try:
            self._blocks.place(blocks)
            if self._is_open(request):
                # At once, before another session needs the memory.
                request.resident.cache.adopt(request.resident.token_ids)
        finally:
            # Blocks that could not be placed are computed.
            request.is_restoring = request.is_restoring and not is_last


def measure_passes(model: LanguageModel, times: PassTimes, num_rows: int, max_len: int) -> None:
    """Measure the parts of a prompt of no session, and a pass of one row after them.

    The fastest of several runs counts for each: at its start a process may share the machine with others that start.

    Args:
        model: the model, which nothing else uses meanwhile.
        times: of its passes.
        num_rows: of a pass, at most.
        max_len: longest session, at least 2 tokens.
    """
    whole_len = max(_PART_LEN, _NUM_PARTS * model.info.part_rows)
    part_len = max(1, min(whole_len, num_rows, max_len - 1))
    starts = range(0, min(max(_MEASURED_LEN, 2 * part_len), max_len - 1) - part_len + 1, part_len)
    runs = [_run_passes(model, [part_len] * len(starts) + [1]) for _ in range(_NUM_RUNS)]
    *parts_s, decode_s = (min(durations_s) for durations_s in zip(*runs, strict=True))
    times.observe(decode_s, 1)
    for start, part_s in zip(starts, parts_s, strict=True):
        times.observe(part_s, 0, [(part_len, start)])


def _run_passes(model: LanguageModel, lens: Sequence[int]) -> list[float]:
    """Return the seconds of passes of so many rows, one after the other along a text of no session."""
    cache = model.new_cache(secrets.token_bytes(16))
    durations_s = []
    start = 0
    for span_len in lens:
        token_ids = tuple(number % model.info.vocabulary_size for number in range(span_len))
        step = SessionStep(cache, TokenSpan(start, token_ids), wants_logits=span_len == 1)
        started_s = time.perf_counter()
        model.forward([step])
        durations_s.append(time.perf_counter() - started_s)
        cache.keep(())
        start += span_len
    cache.release()
    return durations_s
