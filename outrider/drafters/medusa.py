"""Drafting with Medusa's heads (Cai et al. 2024): all guesses follow from what the target's output layer last took."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal
from outrider.drafters.features import FeatureBuffer
from outrider.drafters.growth import GrowthOptions, new_growth
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.tokens import FeatureSpan, ProposalNode


class MedusaDrafter(Drafter):
    """A `Drafter` that keeps one feature a session and completes every proposal in one step.

    Guess k looks at no guess before it, so every node of a depth has the same children, weighed by its own confidence.

    Args:
        heads: in bfloat16; as many guesses one after another.
        vocabulary: what they can say.
        info: identity and limits.
        growth: how proposals grow.
        device: where the heads are.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        vocabulary: DraftVocabulary,
        info: DrafterInfo,
        growth: GrowthOptions,
        device: torch.device,
    ) -> None:
        self._heads = heads
        self._vocabulary = vocabulary
        self._info = info
        self._growth = growth
        self._device = device
        self._last: dict[str, FeatureBuffer] = {}

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of the features, in bytes."""
        return sum(buffer.num_bytes for buffer in self._last.values())

    def resume(self, session_id: str) -> int:
        """Forgets the session's feature: of what comes, the last one is wanted, and what came before never is."""
        self._last.pop(session_id, None)
        return 2**32 - 1

    def give(self, session_id: str, features: FeatureSpan) -> bool:
        """Keeps the last of the features; those before it are not missed."""
        buffer = self._last.setdefault(session_id, FeatureBuffer(self._info.hidden_size))
        if features.start > buffer.end or not len(buffer):
            buffer.restart(features.start)
        buffer.give(features)
        buffer.skip(buffer.end - 1)
        return False

    def truncate(self, session_id: str, length: int) -> None:
        """Keeps the feature: it came after the session was opened, so it is of the tokens that are to come."""

    def forget(self, session_id: str) -> None:
        """Drops the session's feature."""
        self._last.pop(session_id, None)

    @torch.no_grad()
    def step(self, proposals: Sequence[OpenProposal]) -> int:
        """Completes every proposal whose feature is here; of the others it says which one is missing."""
        ready = [item for item in proposals if self._is_ready(item)]
        if not ready:
            return 0
        rows = torch.cat([self._last[item.session_id].peek() for item in ready]).to(self._device)
        states = torch.stack(list(self._heads.unroll(rows)), dim=1)  # [B, K, H]
        for item, logits in zip(ready, self._heads.lm_head(states), strict=True):
            item.fill(self._grown(item, logits))
        return len(ready)

    def _is_ready(self, proposal: OpenProposal) -> bool:
        position = len(proposal.token_ids) - 2
        if position < 0:
            proposal.complete = True  # nothing is guessed behind a single token
            return False
        buffer = self._last.get(proposal.session_id)
        if buffer is None or not len(buffer) or buffer.start != position:
            proposal.missing_features_from = position
            return False
        return True

    def _grown(self, proposal: OpenProposal, logits: Tensor) -> list[ProposalNode]:
        """Returns the proposal's nodes, given the logits of every depth: [K, D]."""
        proposal.num_speculative_tokens = min(proposal.num_speculative_tokens, len(logits))
        growth = new_growth(proposal, self._growth, self._vocabulary)
        for row in logits:
            if growth.frontier:
                growth.grow(row.expand(len(growth.frontier), -1))
        return growth.nodes()
