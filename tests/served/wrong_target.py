"""A target that replaces a rejected token by its most likely one: a wrong rule, which the test of fit must catch."""

import torch

import target_service.engine.rounds
from outrider.speculation.randomness import Counter
from outrider.speculation.verification import DecisionSource, Outcome, TargetDistributions, verify_rejection
from outrider.tokens import ProposalTree, TokenOrigin
from target_service.__main__ import main


class _TopInsteadOfResidual:
    """Decides like the real source, but takes the most likely token where a drafted one was rejected."""

    def __init__(self, source: DecisionSource) -> None:
        self._source = source

    def pick(self, weights: torch.Tensor, counter: Counter) -> int:
        return int(weights.argmax())

    def accept(self, probability: float, counter: Counter) -> bool:
        return self._source.accept(probability, counter)


def wrong_rule(tree: ProposalTree, distribution: TargetDistributions, base_len: int, source: DecisionSource) -> Outcome:
    """Judges by the rejection rule, with the wrong replacement where one is due."""
    right = verify_rejection(tree, distribution, base_len, source)
    if right.origins[-1] is TokenOrigin.RECOVERED:
        return verify_rejection(tree, distribution, base_len, _TopInsteadOfResidual(source))
    return right


if __name__ == "__main__":
    target_service.engine.rounds.verify_rejection = wrong_rule
    main()
