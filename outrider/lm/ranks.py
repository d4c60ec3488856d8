"""Several processes that run one model together, each with a part of every weight (tensor parallelism).

`torchrun` starts them and says who is who. The first rank serves; the others repeat each of its passes on their parts:

    first rank   plan a pass -> broadcast the plan -> run it -> logits
    other ranks                 receive the plan   -> run it

A plan is a few hundred whole numbers (`pass_plan`), broadcast as a tensor behind another that has their number: never
pickles, which can do anything where they are read. It goes over a group of its own on the CPU, since waiting for the
next request may take any time, while the sums within a pass must not.
"""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from outrider.errors import ModelUnsupported

_LOG: Final = logging.getLogger(__name__)
_PASS_TIMEOUT: Final = timedelta(minutes=5)
_IDLE_TIMEOUT: Final = timedelta(days=3650)
"""A rank that dies ends its connections, which the others notice at once: only idleness is waited for."""

_END: Final = -1
"""In place of the number of numbers: no more plans come."""
_MAX_NUMBERS: Final = 1 << 26
"""Of one plan: 512 MiB, more than any pass of the largest settings takes."""

ResultT = TypeVar("ResultT")


class Ranks:
    """This process's place among the ranks.

    Args:
        device: `cpu`, or `cuda` for one GPU each.

    Raises:
        ModelUnsupported: the ranks cannot be joined.
    """

    def __init__(self, device: str) -> None:
        kind = torch.device(device).type
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=_PASS_TIMEOUT)
            self._plans = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise ModelUnsupported(f"cannot join the other ranks: {str(error).splitlines()[0]}") from error
        self.rank = dist.get_rank()
        """Number of this process; the first, 0, serves."""
        self.num = dist.get_world_size()
        """Processes in all."""

    def run(self, plan: Sequence[int], run: Callable[[], ResultT]) -> ResultT:
        """Has the other ranks run a plan, runs it here, and returns the result; for the first rank.

        Where it fails the process ends: the others may be in the middle of a sum that this one has left, and no later
        pass could be trusted. `torchrun` ends them, and starts all again if it was told to.

        Args:
            plan: whole numbers of at most 64 bits.
            run: runs it on this rank.

        Raises:
            ValueError: the plan is too long; nothing was sent, and nothing was run.
        """
        self._send(plan)
        try:
            return run()
        except Exception:
            _LOG.exception("a pass failed on this rank: all ranks end")
            os._exit(os.EX_SOFTWARE)

    def follow(self, run: Callable[[Sequence[int]], object]) -> None:
        """Runs each plan that the first rank sends, until it is done. For the other ranks.

        Raises:
            ValueError: what came is no plan.
        """
        while (num := int(self._broadcast(torch.zeros(1, dtype=torch.int64)).item())) != _END:
            if not 0 <= num <= _MAX_NUMBERS:
                raise ValueError(f"a plan of {num} numbers came, {_MAX_NUMBERS} are the most")
            run(self._broadcast(torch.zeros(num, dtype=torch.int64)).tolist())

    def leave(self) -> None:
        """Ends the other ranks' `follow` where this is the first, and the connections."""
        if self.rank == 0:
            self._broadcast(torch.tensor([_END]))
        dist.destroy_process_group()

    def _send(self, plan: Sequence[int]) -> None:
        if len(plan) > _MAX_NUMBERS:
            raise ValueError(f"a plan of {len(plan)} numbers, {_MAX_NUMBERS} are the most")
        self._broadcast(torch.tensor([len(plan)]))
        self._broadcast(torch.tensor(plan, dtype=torch.int64))

    def _broadcast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the first rank's numbers, of the same shape on all ranks."""
        dist.broadcast(numbers, src=0, group=self._plans)
        return numbers


def num_ranks() -> int:
    """Returns how many processes `torchrun` started for this model; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))
