"""How long a draft takes to answer, and to go on: measured by what arrives."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from outrider.control.pass_times import MAX_RATIO, DecayingMean

_MAX_VERDICTS: Final = 64


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Answers of the drafts of many sessions.

    Attributes:
        seconds: from a verdict to what a draft says to it.
        depth: of what then comes at once.
    """

    seconds: DecayingMean = field(default_factory=lambda: DecayingMean(0.2, max_ratio=MAX_RATIO))
    depth: DecayingMean = field(default_factory=lambda: DecayingMean(0.2))


class DraftTimes:
    """When what a draft says about one session arrives, as the target sees it.

    Args:
        prior: seconds and depth of answers over all sessions, to which this one adds, and from which it starts.
    """

    def __init__(self, prior: AnswerTimes | None = None) -> None:
        self._prior = AnswerTimes() if prior is None else prior
        self._answer_s = DecayingMean(0.3, max_ratio=MAX_RATIO)
        self._answer_depth = DecayingMean(0.3)
        self._verdicts: OrderedDict[int, float] = OrderedDict()
        self.step_s = 0.0
        """Seconds of a step of the draft, as it says."""

    @property
    def known(self) -> bool:
        """Whether an answer to a verdict, or a wait in vain, was observed, here or in another session."""
        return self._answer_s.known or self._prior.seconds.known

    def note_verdict(self, length: int, now: float) -> None:
        """Learns that a verdict which makes the session so long leaves at a time (monotonic, seconds)."""
        self._verdicts[length] = now
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def note_answer(self, known_len: int, now: float, depth: int = 0) -> None:
        """Learns that nodes arrive from a draft that knows of the verdict which made the session so long.

        Args:
            known_len: length of the session as the draft knew it.
            now: monotonic time.
            depth: of what came at once, where a tree begins with it; many drafts send all that they have together.
        """
        if depth:
            self._answer_depth.observe(depth)
            self._prior.depth.observe(depth)
        sent = self._verdicts.get(known_len)
        if sent is None:
            return
        taken_s = now - sent
        self._answer_s.observe(taken_s if self._answer_s.known else self._prior.seconds.clipped(taken_s))
        self._prior.seconds.observe(taken_s)
        for length in [length for length in self._verdicts if length <= known_len]:
            del self._verdicts[length]

    def note_silence(self, wait_s: float) -> None:
        """Learns that a round waited in vain, which stands for an answer that took as long."""
        self._answer_s.observe(wait_s, is_certain=True)

    def arrival_s(self, num_steps: int, *, is_running: bool) -> float:
        """Returns the seconds until so many more steps of the draft have arrived.

        Args:
            num_steps: at least 1.
            is_running: whether the draft is already at work on them; else it begins with the verdict of now.
        """
        if is_running:
            return num_steps * self.step_s
        answer_s = self._answer_s if self._answer_s.known else self._prior.seconds
        depth = self._answer_depth if self._answer_depth.known else self._prior.depth
        first_s = answer_s.value - max(0.0, depth.value - 1) * self.step_s
        return max(0.0, first_s) + (num_steps - 1) * self.step_s
