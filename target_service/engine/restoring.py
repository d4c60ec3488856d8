"""How a session whose KV cache is not here gets it back from Redis before it runs."""

import functools
import secrets
import time
from collections.abc import Callable
from typing import Final

import torch

from outrider.lm.model import LanguageModel, SessionStep
from outrider.tokens import TokenSpan
from target_service.engine.pass_budget import PassBudget
from target_service.engine.sessions import Request
from target_service.kv_blocks.remote_blocks import RemoteBlocks

_NUM_MEASURED_BLOCKS: Final = 4


class Restoring:
    """Fetches what requests lack, where that pays. All methods run in the engine's thread.

    Args:
        blocks: the blocks in Redis.
        budget: knows what computing takes.
        submit: has the engine's thread run a command; from any thread.
        is_open: returns whether a request has not ended.
    """

    def __init__(
        self,
        blocks: RemoteBlocks,
        budget: PassBudget,
        submit: Callable[[Callable[[], None]], None],
        is_open: Callable[[Request], bool],
    ) -> None:
        self._blocks = blocks
        self._budget = budget
        self._submit = submit
        self._is_open = is_open

    def begin(self, request: Request) -> None:
        """Has what is missing of a session's KV cache fetched, if that pays; until then the request does not run."""
        if request.is_restoring or not request.has_start:
            return
        resident, block_len = request.resident, self._blocks.block_len
        absent = resident.cache.absent(resident.token_ids)
        if absent:
            compute_s = self._budget.cost_s(len(absent) * block_len, absent[0][0] * block_len)
            request.is_restoring = self._blocks.fetch(absent, compute_s, functools.partial(self._on_blocks, request))

    def write_behind(self) -> None:
        """Has what the last pass completed written, if that pays."""
        self._blocks.write_behind(lambda num_tokens: self._budget.cost_s(num_tokens, 0))

    def _on_blocks(self, request: Request, blocks: list[tuple[bytes, int, torch.Tensor]], is_last: bool) -> None:
        """Takes blocks from the thread that read them."""
        self._submit(functools.partial(self._place, request, blocks, is_last))

    def _place(self, request: Request, blocks: list[tuple[bytes, int, torch.Tensor]], is_last: bool) -> None:
        try:
            self._blocks.place(blocks)
            if self._is_open(request):
                # At once, before another session needs the memory.
                request.resident.cache.adopt(request.resident.token_ids)
        finally:
            # Whatever could not be placed is computed.
            request.is_restoring = request.is_restoring and not is_last


def measure_prefill(model: LanguageModel, budget: PassBudget, num_rows: int) -> None:
    """Runs a prompt that is nobody's twice, and notes what it took once all was warm.

    Args:
        model: what runs it.
        budget: learns.
        num_rows: length of the prompt, at least 1.
    """
    token_ids = tuple(number % model.info.vocabulary_size for number in range(num_rows))
    duration_s = 0.0
    for _ in range(2):
        cache = model.new_cache(secrets.token_bytes(16))
        started = time.perf_counter()
        model.forward([SessionStep(cache, TokenSpan(0, token_ids), wants_logits=False)])
        duration_s = time.perf_counter() - started
        cache.release()
    budget.observe(0, [(num_rows, 0)], duration_s)


def num_measured_rows(block_len: int, max_rows: int) -> int:
    """Returns how long a prompt to measure should be."""
    return max(1, min(_NUM_MEASURED_BLOCKS * block_len, max_rows))
