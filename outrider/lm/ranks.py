"""Tensor parallelism: several processes run one model, each with a part of every weight.

`torchrun` starts the processes and assigns their ranks. Rank 0 serves; the others repeat each of its passes on their
parts:

    first rank   plan a pass -> broadcast the plan -> run it -> logits
    other ranks                 receive the plan   -> run it

A plan is a few hundred integers (see `pass_plan`), broadcast as a tensor of their number and a tensor of the numbers;
never as pickles, which can execute code when they are read. Plans use a CPU process group of their own, because waiting
for the next request has no time limit, while the reductions within a pass have one.
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
"""Timeout of waiting for the next plan: a rank that dies closes its connections, which the others detect at once."""

_END: Final = -1
"""Sent in place of the number of numbers when no more plans follow."""
_MAX_NUMBERS: Final = 1 << 26
"""Maximum numbers of a plan: 512 MiB, more than a pass with the largest settings needs."""

ResultT = TypeVar("ResultT")


class Ranks:
    """The rank of this process, and the connections to the other ranks.

    Args:
        device: `cpu`, or `cuda` for one GPU per rank.

    Raises:
        ModelUnsupported: the process group cannot be joined.
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
        """Number of this process, from 0; rank 0 serves."""
        self.num = dist.get_world_size()
        """Number of processes."""

    def run(self, plan: Sequence[int], run: Callable[[], ResultT]) -> ResultT:
        """Run a plan on all ranks and return the result; for rank 0.

        If it fails, the process exits: other ranks may be in a reduction that this one has left, so that later passes
        would be wrong. `torchrun` then ends the others, and restarts all if configured to.

        Args:
            plan: integers of at most 64 bits.
            run: runs the plan on this rank.

        Raises:
            ValueError: the plan is too long; nothing was sent or run.
        """
        self._send(plan)
        try:
            return run()
        except Exception:
            _LOG.exception("a pass failed on this rank: all ranks exit")
            os._exit(os.EX_SOFTWARE)

    def follow(self, run: Callable[[Sequence[int]], object]) -> None:
        """Run each plan that rank 0 sends, until it leaves; for the other ranks.

        Args:
            run: runs a plan on this rank.

        Raises:
            ValueError: the message is not a plan.
        """
        while (num := int(self._broadcast(torch.zeros(1, dtype=torch.int64)).item())) != _END:
            if not 0 <= num <= _MAX_NUMBERS:
                raise ValueError(f"received a plan of {num} numbers, the maximum is {_MAX_NUMBERS}")
            run(self._broadcast(torch.zeros(num, dtype=torch.int64)).tolist())

    def leave(self) -> None:
        """Close the connections; on rank 0, end `follow` of the other ranks first."""
        if self.rank == 0:
            self._broadcast(torch.tensor([_END]))
        dist.destroy_process_group()

    def _send(self, plan: Sequence[int]) -> None:
        if len(plan) > _MAX_NUMBERS:
            raise ValueError(f"the plan has {len(plan)} numbers, the maximum is {_MAX_NUMBERS}")
        self._broadcast(torch.tensor([len(plan)]))
        self._broadcast(torch.tensor(plan, dtype=torch.int64))

    def _broadcast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers of rank 0; the shape must be the same on all ranks."""
        dist.broadcast(numbers, src=0, group=self._plans)
        return numbers


def num_ranks() -> int:
    """Return the number of processes that `torchrun` started for this model; 1 without `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1"))
