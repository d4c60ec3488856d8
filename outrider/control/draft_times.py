"""The times at which a draft's nodes arrive, as the target observes them.

They are not the times of the draft's passes (`pass_times`): an answer also crosses the network twice and waits in
queues at both ends. Only the time of one of the draft's steps is its own; the draft measures and sends it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from outrider.control.decaying_mean import DecayingMean
from outrider.control.pass_times import MAX_RATIO

_MAX_VERDICTS: Final = 64


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """The answers of the drafts of all sessions.

    Attributes:
        seconds: from a verdict to the first nodes drafted after it.
        depth: of the nodes that arrive first.
    """

    seconds: DecayingMean = field(default_factory=lambda: DecayingMean(0.2, max_ratio=MAX_RATIO, doubts_first=True))
    depth: DecayingMean = field(default_factory=lambda: DecayingMean(0.2))


class DraftTimes:
    """When the nodes that a draft sends for one session arrive.

    Args:
        prior: seconds and depth of answers over all sessions, to which this one adds, and from which it starts.

    Attributes:
        step_s: seconds of a step of the draft for each token of a path, as it last reported; 0 while unknown.
    """

    def __init__(self, prior: AnswerTimes | None = None) -> None:
        self._prior = AnswerTimes() if prior is None else prior
        self._answer_s = DecayingMean(0.3, max_ratio=MAX_RATIO, doubts_first=True)
        self._answer_depth = DecayingMean(0.3)
        self._verdicts: OrderedDict[int, float] = OrderedDict()
        self.step_s = 0.0

    @property
    def known(self) -> bool:
        """Whether an answer to a verdict, or a timeout, was observed, here or in another session."""
        return self._answer_s.known or self._prior.seconds.known

    def record_verdict(self, length: int, now: float) -> None:
        """Record that the verdict which makes the session so long leaves at a time (monotonic, seconds)."""
        self._verdicts[length] = now
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def record_answer(self, known_len: int, now: float, depth: int = 0, *, had_text: bool = False) -> None:
        """Record that nodes arrive, drafted after the verdict which made the session so long.

        Args:
            known_len: length of the session at the draft when it sent them.
            now: monotonic time.
            depth: of the nodes that arrive together, where a tree begins with them; many drafts send a whole proposal
                at once.
            had_text: whether the draft had a text to read first, which later answers will not wait for: then it shows
                what they take at most.
        """
        if depth:
            self._answer_depth.observe(depth)
            self._prior.depth.observe(depth)
        sent = self._verdicts.get(known_len)
        if sent is None:
            return
        for length in [length for length in self._verdicts if length <= known_len]:
            del self._verdicts[length]
        taken_s = now - sent
        if had_text and self.known and taken_s > self._usual.value:
            return
        self._answer_s.observe(taken_s if self._answer_s.known else self._prior.seconds.clipped(taken_s))
        self._prior.seconds.observe(taken_s)

    def record_timeout(self, wait_s: float) -> None:
        """Record that a round's wait timed out, which counts as an answer that took as long."""
        self._answer_s.observe(wait_s, is_certain=True)

    def arrival_s(self, num_tokens: int, *, is_running: bool) -> float:
        """Return the seconds until so many more tokens of a path have arrived.

        Args:
            num_tokens: at least 1.
            is_running: whether the draft is already drafting them; else it begins with the verdict of now.
        """
        if is_running:
            return num_tokens * self.step_s
        depth = self._answer_depth if self._answer_depth.known else self._prior.depth
        first_s = self._usual.value - max(0.0, depth.value - 1) * self.step_s
        return max(0.0, first_s) + (num_tokens - 1) * self.step_s

    @property
    def _usual(self) -> DecayingMean:
        return self._answer_s if self._answer_s.known else self._prior.seconds
