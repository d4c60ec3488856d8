"""Which nodes a draft's step runs: of all sessions, those worth most, while rows pay.

A row makes a step longer for everyone, and so the line later that some target waits for. So a step has more rows for as
long as the value of what it runs grows faster than its measured time: many of one session where rows cost little, few
where they are dear or where many sessions have better ones. A session whose main line is still shorter than its target
has use of always has its best node run, and one that waits for verdicts all that it wants, so that no load of others
keeps a target waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.control.pass_sizes import FOURS, PassSizes
from outrider.control.pass_times import PassTimes
from outrider.control.policy import allocate
from outrider.speculation.proposal_tree import Candidate


@dataclass(frozen=True, slots=True)
class Frontier:
    """What a session could have run in the next step.

    Attributes:
        nodes: those worth most first.
        num_musts: how many of these are run whatever others have.
    """

    nodes: Sequence[Candidate]
    num_musts: int


class StepBudget:
    """Chooses the nodes of steps, and measures what steps take; see the module.

    Args:
        max_rows: of a step, at most, but for one of each session that is awaited.
        sizes: of the model's passes.

    Attributes:
        num_rows_alone: rows that the last step would have had for one of its sessions that run ahead alone; 0 where it
            had none.
    """

    def __init__(self, max_rows: int, sizes: PassSizes = FOURS) -> None:
        self.num_rows_alone = 0
        self._max_rows = max_rows
        self._times = PassTimes(sizes)
        self._seen: set[int] = set()
        self._num_chosen = 0

    def choose(self, frontiers: Sequence[Frontier], num_ends: int, num_rows: int) -> list[list[int]]:
        """Returns the nodes of each session that the next step runs.

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

    def observe(self, duration_s: float, num_rows: int) -> None:
        """Takes a step into account that ran no long text."""
        size = self._times.sizes.size(num_rows)
        # The first one of a size may have its code made. What that made look dear would not be tried again.
        if size in self._seen and duration_s > 0:
            self._times.observe(duration_s, num_rows)
        self._seen.add(size)

    def _alone(self, frontiers: Sequence[Frontier]) -> int:
        """Returns the rows that one of the sessions, another one in each step, would have by itself."""
        if not frontiers:
            return 0
        self._num_chosen += 1
        nodes = frontiers[self._num_chosen % len(frontiers)].nodes
        return len(allocate([nodes], 0.0, 0, self._max_rows, self._times)[0])
