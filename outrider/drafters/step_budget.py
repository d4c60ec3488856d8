"""The choice of nodes that a draft's step runs: of all sessions, those worth most, while rows pay.

A row makes a step longer for all sessions, and so the line later that some target waits for. So a step has more rows
for as long as the value of its nodes grows faster than its predicted time: many of one session where rows cost little,
few where they cost much or where many sessions have better ones. A session whose main line is shorter than what its
target can verify always has its best node run, and one that waits for verdicts all its nodes, so that no load of others
keeps a target waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.control.allocation import allocate
from outrider.control.pass_times import PassTimes
from outrider.speculation.proposal_tree import Candidate


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of a session that the next step could run.

    Attributes:
        nodes: those worth most first.
        num_musts: how many of these are run whatever the other sessions have.
    """

    nodes: Sequence[Candidate]
    num_musts: int


class StepBudget:
    """Chooses the nodes of steps; see the module.

    Args:
        max_rows: of a step, at most, but for one of each session whose target waits.
        times: of the model's passes.

    Attributes:
        num_rows_alone: rows that the last step would have had for one of its sessions that run ahead alone; 0 where it
            had none.
    """

    def __init__(self, max_rows: int, times: PassTimes) -> None:
        self.num_rows_alone = 0
        self._max_rows = max_rows
        self._times = times
        self._num_chosen = 0

    def choose(self, frontiers: Sequence[Frontier], num_ends: int, num_rows: int) -> list[list[int]]:
        """Return the nodes of each session that the next step runs.

        Args:
            frontiers: of the sessions whose trees go on.
            num_ends: sessions whose texts the step runs to their ends: each is worth as much as a node that is certain.
            num_rows: of all texts.
        """
        musts = [item.nodes[: item.num_musts] for item in frontiers]
        mays = [item.nodes[len(must) :] for item, must in zip(frontiers, musts, strict=True)]
        num_tokens = num_ends + sum(node.value for must in musts for node in must)
        num_rows += sum(map(len, musts))
        chosen = allocate(mays, num_tokens, num_rows, max(self._max_rows, num_rows + 1), self._times)
        self.num_rows_alone = self._alone([item for item in frontiers if item.num_musts < len(item.nodes)])
        return [[*(node.number for node in must), *numbers] for must, numbers in zip(musts, chosen, strict=True)]

    def _alone(self, frontiers: Sequence[Frontier]) -> int:
        """Return the rows that one of the sessions, another one in each step, would have by itself."""
        if not frontiers:
            return 0
        self._num_chosen += 1
        nodes = frontiers[self._num_chosen % len(frontiers)].nodes
        return len(allocate([nodes], 0.0, 0, self._max_rows, self._times)[0])
