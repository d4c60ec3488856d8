"""Drafting with Medusa's heads (Cai et al. 2024): all guesses follow from the target's last hidden state."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from outrider.control.pass_times import PassTimes
from outrider.drafters.choices import TreeOptions
from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal, StepRows
from outrider.drafters.features import FeatureBuffer, Features
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree import DraftTree, root_tree
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.vocabulary import DraftVocabulary

_WIDTH: Final = 12
"""Nodes that are expanded in a step, at most."""


class _Session:
    """The state of one session.

    Attributes:
        features: the last one.
        node_values: of its nodes.
        drafted: the last tree that was drafted, whose outcome has yet to be observed.
    """

    def __init__(self, width: int) -> None:
        self.features = FeatureBuffer(width)
        self.node_values = NodeValues.of_one_session()
        self.drafted: DraftTree | None = None


class MedusaDrafter(Drafter):
    """A `Drafter` that keeps one feature a session and completes every proposal in one step.

    Guess k depends on no guess before it, so every node of a depth has the same children, weighted by its own value.

    Args:
        heads: in bfloat16; as many guesses one after another.
        vocabulary: the tokens that they can predict.
        info: identity and limits.
        options: of its trees.
        device: where the heads are.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        vocabulary: DraftVocabulary,
        info: DrafterInfo,
        options: TreeOptions,
        device: torch.device,
    ) -> None:
        self.times = PassTimes()
        self._heads = heads
        self._vocabulary = vocabulary
        self._info = info
        self._options = options
        self._device = device
        self._sessions: dict[str, _Session] = {}
        self._node_values = NodeValues.of_all_sessions()

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of the features, in bytes."""
        return sum(session.features.num_bytes for session in self._sessions.values())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a path that one step drafts: one for each head."""
        return len(self._heads.heads)

    def resume(self, session_id: str) -> int:
        """Drop the session's feature: only the last of those that arrive is used, and none that arrived before."""
        self._sessions.pop(session_id, None)
        return 2**32 - 1

    def give(self, session_id: str, features: Features) -> bool:
        """Keep the last of the features; those before it are not needed."""
        buffer = self._sessions.setdefault(session_id, _Session(self._info.hidden_size)).features
        if features.start > buffer.end or not len(buffer):
            buffer.restart(features.start)
        buffer.give(features)
        buffer.skip(buffer.end - 1)
        return False

    def truncate(self, session_id: str, length: int) -> None:
        """Keep the feature: it arrived after the session was opened, so it belongs to the tokens that follow."""

    def forget(self, session_id: str) -> None:
        """Drop the session's feature."""
        self._sessions.pop(session_id, None)

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        """Observe the outcome of the proposal; the next one is drafted from another feature."""
        session = self._sessions.get(proposal.session_id)
        if session is not None and session.drafted is not None and session.drafted.proposal is proposal:
            session.drafted.follow(token_ids)
            session.drafted = None
        return False

    @torch.no_grad()
    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Complete every proposal whose feature has arrived; mark the others with the position that is missing."""
        ready = [item for item in proposals if self._is_ready(item)]
        if not ready:
            return StepRows()
        rows = torch.cat([self._sessions[item.session_id].features.peek() for item in ready]).to(self._device)
        states = torch.stack(list(self._heads.unroll(rows)), dim=1)  # [B, K, H]
        for item, logits in zip(ready, self._heads.lm_head(states), strict=True):
            self._draft(item, logits)
        return StepRows(len(ready))

    def _is_ready(self, proposal: OpenProposal) -> bool:
        position = len(proposal.token_ids) - 2
        if position < 0:
            proposal.complete = True  # no token is predicted after a single one
            return False
        session = self._sessions.get(proposal.session_id)
        if session is None or not len(session.features) or session.features.start != position:
            proposal.missing_features_from = position
            return False
        return True

    def _draft(self, proposal: OpenProposal, logits: Tensor) -> None:
        """Complete a proposal, given the logits of every depth: [K, D]."""
        proposal.num_speculative_tokens = min(proposal.num_speculative_tokens, len(logits))
        session = self._sessions[proposal.session_id]
        tree = root_tree(proposal, self._options, self._vocabulary, self._node_values, session.node_values)
        session.drafted = tree
        edge = [tree.root]
        while edge:
            tree.expand(edge, logits[[node.depth for node in edge]])
            edge = [node for _, node in tree.frontier(_WIDTH)]
        proposal.fill(tree.take())
