"""The production rules as functions of a tree, distributions and a source, so that every draw can be enumerated."""

from outrider.speculation.randomness import Counter, Purpose
from outrider.speculation.verification import (
    DecisionSource,
    Outcome,
    TargetDistributions,
    follow_draws,
    verify_rejection,
)
from outrider.tokens import ProposalTree
from tests.exactness.generation import Rule


def coupled(
    tree: ProposalTree, distribution_after: TargetDistributions, base_len: int, source: DecisionSource
) -> Outcome:
    """Run `follow_draws` on draws of the source; production uses `target_draws`.

    `tests/speculation/test_draws.py` tests that both draw the same tokens, and the pathwise proof tests the rounds.
    """
    return follow_draws(
        tree,
        lambda number: source.pick(distribution_after(number), Counter(Purpose.TARGET, base_len + tree.depth(number))),
    )


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": verify_rejection}
