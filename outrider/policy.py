"""When a session should wait for a proposal: the speculation policy of the target.

A round that waits for a proposal costs the wait and a pass over it, and outputs 1 + accepted tokens; a plain round
costs a plain pass and outputs one. With E the expected number of accepted tokens, waiting pays iff

    (1 + E) * plain_pass_s > wait_s + proposal_pass_s

All four are measured, as decaying means. E is measured even while a session decodes plainly, at no cost: proposals that
come too late are compared with the tokens that the target gave meanwhile (`observe_late`). So a session whose draft
becomes useful, as when a text begins to copy its prompt, takes up speculation again, and one whose draft is slow, wrong
or dead decodes at the speed of plain decoding.
"""

from dataclasses import dataclass

_RETRY_ROUNDS = 64
"""Plain rounds after which one proposal is waited for again, since waits are only measured by waiting."""


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
    """Measured pass times of one target, over all its sessions: seconds for passes without and with proposals."""

    def __init__(self) -> None:
        self.plain_s = DecayingMean(0.05)
        self.proposal_s = DecayingMean(0.05)

    def observe(self, duration_s: float, *, with_proposals: bool) -> None:
        """Takes a decoding pass into account (not one that prefills)."""
        (self.proposal_s if with_proposals else self.plain_s).observe(duration_s)


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
    _plain_rounds: int = 0

    @classmethod
    def create(cls, max_wait_s: float, times: PassTimes, *, adapts: bool = True) -> "SpeculationPolicy":
        """Returns the policy of a new request: it waits until it has reason not to."""
        return cls(max_wait_s, times, adapts, DecayingMean(0.15), DecayingMean(0.3))

    @property
    def expected_accepted(self) -> float:
        """Accepted tokens expected of the next proposal."""
        return self._accepted.value

    def wait_s(self) -> float:
        """Returns how long the next round may wait for its proposal, in seconds."""
        if self.max_wait_s <= 0:
            return 0.0
        waits = not self.adapts or self._pays() or self._plain_rounds >= _RETRY_ROUNDS
        return self.max_wait_s if waits else 0.0

    def observe_round(self, num_accepted: int, wait_s: float) -> None:
        """Takes a round that waited into account, whether or not a proposal came; `wait_s` is how long it waited."""
        self._plain_rounds = 0
        self._accepted.observe(num_accepted)
        self._wait_s.observe(wait_s)

    def observe_plain(self) -> None:
        """Takes a round into account that did not wait."""
        self._plain_rounds += 1

    def observe_late(self, num_matching: int) -> None:
        """Takes a proposal into account that came too late: how many of its tokens the target gave by itself."""
        self._accepted.observe(num_matching)

    def _pays(self) -> bool:
        """Whether waiting is expected to pay; the first rounds wait, since nothing is known yet."""
        plain_s, proposal_s = self.times.plain_s, self.times.proposal_s
        if not (self._accepted.known and self._wait_s.known and (plain_s.known or proposal_s.known)):
            return True
        # The one that was never seen is taken to be like the other: passes with a few rows more cost little more.
        plain = plain_s.value if plain_s.known else proposal_s.value
        proposal = proposal_s.value if proposal_s.known else plain
        return (1 + self._accepted.value) * plain > self._wait_s.value + proposal
