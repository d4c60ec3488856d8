"""When a session should wait for a proposal: the speculation policy of the target.

A round that waits for a proposal of K nodes and has E of them accepted outputs 1 + E tokens instead of one. It costs
the wait, in which plain passes would have given this session tokens, and K rows more in a pass of n sessions, all of
which are held up by them. With a pass over r rows taking T(r) = a + b r seconds, waiting pays iff

    E T(n) > wait_s + n K b

which holds for one session among plain ones as for all of them together; a choice is kept until the other looks
better by a margin. As passes fill, n grows, and with it what a row
costs everyone: speculation ends by itself, first where proposals are poor or late.

All of this is measured, and old values fade. E is measured even while a session decodes plainly, at no cost: proposals
that come too late are compared with the tokens that the target gave meanwhile (`observe_late`). So a session whose
draft becomes useful, as when a text begins to copy its prompt, takes up speculation again, and one whose draft is slow,
wrong or dead decodes at the speed of plain decoding.
"""

from dataclasses import dataclass

_RETRY_ROUNDS = 64
"""Plain rounds after which one proposal is waited for again, since waits are only measured by waiting."""
_MAX_RETRY_ROUNDS = 1024
"""As many once that has been in vain several times; each time doubles them."""
_FADING = 0.98
_MARGIN = 1.25
"""How much better the other choice must look: passes in which some sessions wait and some do not serve neither well."""


class DecayingMean:
    """A mean in which an observation `n` steps old weighs (1 - share) ** n; the first ones weigh more."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._num = 0
        self.value = 0.0

    def observe(self, value: float) -> None:
        """Takes a value into the mean."""
        self._num += 1
        self.value += max(self._share, 1 / self._num) * (value - self.value)

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._num > 0


class PassTimes:
    """Measured decoding passes of one target, over all its sessions: seconds as a line over the number of rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._squares = self._seconds = self._products = 0.0
        self.num_sessions = 1
        """Sessions that decode now."""

    @property
    def known(self) -> bool:
        """Whether any pass was observed."""
        return self._weight > 0

    def observe(self, duration_s: float, num_rows: int) -> None:
        """Takes a decoding pass into account (not one that prefills)."""
        values = (1.0, num_rows, num_rows**2, duration_s, num_rows * duration_s)
        sums = (self._weight, self._rows, self._squares, self._seconds, self._products)
        faded = (_FADING * total + value for total, value in zip(sums, values, strict=True))
        self._weight, self._rows, self._squares, self._seconds, self._products = faded

    @property
    def row_s(self) -> float:
        """Seconds that a row adds to a pass; 0 while passes of different sizes have not shown it."""
        spread = self._weight * self._squares - self._rows**2
        if spread <= 1e-3 * self._rows**2:
            return 0.0
        return max(0.0, (self._weight * self._products - self._rows * self._seconds) / spread)

    def pass_s(self, num_rows: int) -> float:
        """Returns the seconds of a pass over so many rows; 0 while nothing is known."""
        if not self.known:
            return 0.0
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        return max(0.1 * mean_s, mean_s + self.row_s * (num_rows - mean_rows))


@dataclass(slots=True)
class SpeculationPolicy:
    """Decides for one session, before each round, how long to wait for its proposal.

    Attributes:
        max_wait_s: longest wait; 0 when nothing will come.
        times: the target's measured pass times.
        adapts: whether to stop waiting where that does not pay; without it every round waits.
    """

    max_wait_s: float
    times: PassTimes
    adapts: bool
    _accepted: DecayingMean
    _wait_s: DecayingMean
    _num_nodes: DecayingMean
    _plain_rounds: int = 0
    _retry_rounds: int = _RETRY_ROUNDS

    @classmethod
    def create(cls, max_wait_s: float, times: PassTimes, *, adapts: bool = True) -> "SpeculationPolicy":
        """Returns the policy of a new request: it waits until it has reason not to."""
        return cls(max_wait_s, times, adapts, DecayingMean(0.15), DecayingMean(0.3), DecayingMean(0.15))

    @property
    def expected_accepted(self) -> float:
        """Accepted tokens expected of the next proposal."""
        return self._accepted.value

    def wait_s(self) -> float:
        """Returns how long the next round may wait for its proposal, in seconds."""
        if self.max_wait_s <= 0:
            return 0.0
        if not self.adapts:
            return self.max_wait_s
        if self._pays():
            self._retry_rounds = _RETRY_ROUNDS
        elif self._plain_rounds < self._retry_rounds:
            return 0.0
        else:
            self._retry_rounds = min(2 * self._retry_rounds, _MAX_RETRY_ROUNDS)
        return self.max_wait_s

    def observe_round(self, num_accepted: int, wait_s: float, num_nodes: int) -> None:
        """Takes a round that waited into account, whether or not a proposal came.

        Args:
            num_accepted: nodes that were kept.
            wait_s: seconds that it waited.
            num_nodes: nodes that were proposed; many drafts often have nothing to propose, and cost no rows then.
        """
        self._plain_rounds = 0
        self._accepted.observe(num_accepted)
        self._wait_s.observe(wait_s)
        self._num_nodes.observe(num_nodes)

    def observe_plain(self) -> None:
        """Takes a round into account that did not wait."""
        self._plain_rounds += 1

    def observe_late(self, num_matching: int) -> None:
        """Takes a proposal into account that came too late: how many of its tokens the target gave by itself."""
        self._accepted.observe(num_matching)

    def _pays(self) -> bool:
        """Whether waiting is expected to pay; the first rounds wait, since nothing is known yet."""
        if not (self._accepted.known and self._wait_s.known and self.times.known):
            return True
        num_sessions = self.times.num_sessions
        gained_s = self._accepted.value * self.times.pass_s(num_sessions)
        lost_s = self._wait_s.value + num_sessions * self._num_nodes.value * self.times.row_s
        return gained_s * _MARGIN > lost_s if self._plain_rounds == 0 else gained_s > lost_s * _MARGIN
