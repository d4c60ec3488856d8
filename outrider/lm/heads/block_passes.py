"""A pass of a block head: that of an EAGLE-3 head with mask rows, and the transition between their tokens."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from outrider.lm.heads.block import BlockHead, Transition
from outrider.lm.heads.columns import ColumnPasses
from outrider.lm.heads.passes import HeadPasses, joined, variant_of


class TokenTransition(Protocol):
    """What the tokens of nodes add to the logits after them."""

    def states(self, states: Tensor) -> Tensor:
        """Return what normalised outputs of rows, [R, H], add to a transition: [R, ...]."""

    def logits(self, logits: Tensor, states: Tensor, rows: list[int], token_ids: list[int]) -> Tensor:
        """Return the logits after nodes: [F, D].

        Args:
            logits: of all rows without a transition: [R, D].
            states: what `states` returned for them.
            rows: of the nodes: F of them.
            token_ids: the nodes' own tokens.
        """


class BlockRun(ColumnPasses, Protocol):
    """The passes of a head that drafts a block in one.

    Attributes:
        block_size: tokens that a pass predicts.
    """

    block_size: int

    @property
    def transition(self) -> TokenTransition:
        """What adds to the logits after a token."""


class TransitionPass:
    """The transition of a block head, packed; see `outrider.lm.heads.block`.

    Args:
        transition: in bfloat16, on its device.
        embedding: the target's input embeddings: [V, H].

    Attributes:
        token: the layer over the embedding of the token before, packed.
        state: that over the state.
        output: that over both.
        rank: their numbers between.
    """

    def __init__(self, transition: Transition, embedding: Tensor) -> None:
        self.token, self.state = joined(transition.token), joined(transition.state)
        self.output = joined(transition.output)
        self.rank = transition.output.in_features
        self._embedding = embedding
        self._variant = variant_of((self.token, self.output)) if embedding.is_contiguous() else None

    def states(self, states: Tensor) -> Tensor:
        """Return what states, [R, H], add to a transition: [R, rank]."""
        added: Tensor = self.state(states)
        return added

    def logits(self, logits: Tensor, states: Tensor, rows: list[int], token_ids: list[int]) -> Tensor:
        """Return the logits after nodes: [F, D].

        Args:
            logits: of all rows without a transition: [R, D].
            states: what `states` returned for them: [R, rank].
            rows: of the nodes: F of them.
            token_ids: the nodes' own tokens.
        """
        if self._variant is not None:
            found: Tensor = torch.ops.outrider.transition_logits.default(
                logits,
                states,
                rows,
                token_ids,
                self._embedding,
                self.token.tensors,
                self.output.tensors,
                self._variant,
            )
            return found
        chosen, previous = torch.tensor([rows, token_ids], device=states.device)
        embedded = functional.embedding(previous, self._embedding)
        added: Tensor = self.output(functional.silu(self.token(embedded) + states[chosen]))
        return logits[chosen] + added


class BlockPasses(HeadPasses):
    """The passes of a block head; see `BlockRun`.

    Args:
        head: in bfloat16, on its device.
        embedding: the target's input embeddings: [V, H].
    """

    def __init__(self, head: BlockHead, embedding: Tensor) -> None:
        super().__init__(head, embedding)
        self.block_size = head.block.block_size
        self.transition = TransitionPass(head.transition, embedding)
