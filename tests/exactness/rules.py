"""The production rules as functions of a tree, the target's laws and a source, so that every draw can be enumerated."""

from outrider.speculation.randomness import Counter, Purpose
from outrider.speculation.verification import DecisionSource, Outcome, TargetLaw, follow_draws, verify_rejection
from outrider.tokens import ProposalTree
from tests.exactness.generation import Rule


def coupled(tree: ProposalTree, law: TargetLaw, base_len: int, source: DecisionSource) -> Outcome:
    """Runs `follow_draws` on draws that the source makes, where production has made them by `target_draws`.

    That those two draw the same is for `tests/speculation/test_draws.py`, and that rounds make one of the other
    for the pathwise proof.
    """
    return follow_draws(
        tree, lambda number: source.pick(law(number), Counter(Purpose.TARGET, base_len + tree.depth(number)))
    )


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": verify_rejection}
