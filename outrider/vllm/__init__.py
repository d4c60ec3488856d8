r"""Drafts for a vLLM server: its scheduler gets proposals from Outrider's draft service, on nodes of their own.

    OUTRIDER_DRAFTS=dns:///drafts:50052 vllm serve MODEL --scheduler-cls outrider.vllm.DraftingScheduler \
        --speculative-config \
        '{"method": "custom_class", "model": "outrider.vllm.NoProposals", "num_speculative_tokens": 5}'

- `scheduler`: vLLM's scheduler, which asks a `ProposalSource` before each step; it imports vLLM.
- `remote_drafts`: the source of a vLLM server. It holds the tree that has arrived for each request, decides how long a
  step waits and what it verifies (`step_plan`), and learns what drafts are worth.
- `draft_thread`: the streams to the drafts, in an event loop beside vLLM's thread.
- `proposer`: `NoProposals`, by which vLLM's workers expect proposals and make none themselves.

vLLM accepts a proposed token x with probability p(x), and else draws from the rest of p (Leviathan et al. 2023, with a
draft that is certain of x): its text has the distribution of plain decoding whatever is proposed. So drafts are asked
for their likeliest tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.vllm.proposer import NoProposals
    from outrider.vllm.scheduler import DraftingScheduler

__all__ = ["DraftingScheduler", "NoProposals"]

_PLACES = {"DraftingScheduler": "scheduler", "NoProposals": "proposer"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a public name, importing it: vLLM's workers need no scheduler, and tests no vLLM."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"outrider.vllm.{_PLACES[name]}"), name)
