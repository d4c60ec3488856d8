"""A Markov model that fails for good once it has met a token, as a device does that breaks."""

from collections.abc import Sequence

import torch

from outrider.lm.markov import MarkovModel
from outrider.lm.model import SessionStep

FATAL = 11


def break_at_fatal_token() -> None:
    """Has all Markov models of this process fail from their first pass over `FATAL` on."""
    forward, broken = MarkovModel.forward, set[int]()

    def failing(self: MarkovModel, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        if any(FATAL in step.span.token_ids for step in steps):
            broken.add(id(self))
        if id(self) in broken:
            raise RuntimeError("an illegal memory access was encountered")
        return forward(self, steps)

    MarkovModel.forward = failing  # type: ignore[method-assign]
