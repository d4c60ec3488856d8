"""Speculation statistics: vLLM's four counters, and the acceptance rates computed from them."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStatistics:
    """Counts over the passes of one or more requests.

    Attributes:
        num_drafts: passes that verified a proposal.
        num_draft_tokens: tokens drafted and verified, along the first branch of each proposal.
        num_accepted_tokens: proposed tokens that were accepted.
        num_accepted_tokens_per_pos: of these, by position in the proposal.
        num_target_passes: target passes that produced output tokens.
        num_output_tokens: accepted, recovered and bonus tokens.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_target_passes: int = 0
    num_output_tokens: int = 0

    def record(self, num_draft_tokens: int, num_accepted_tokens: int, num_output_tokens: int) -> None:
        """Add one target pass.

        Args:
            num_draft_tokens: deepest position that was proposed; 0 for a pass without a proposal.
            num_accepted_tokens: proposed tokens that were accepted, in [0, num_draft_tokens].
            num_output_tokens: output tokens of the pass, at least 0.

        Raises:
            ValueError: a number is out of range.
        """
        if not 0 <= num_accepted_tokens <= num_draft_tokens or num_output_tokens < 0:
            raise ValueError(f"{num_accepted_tokens} of {num_draft_tokens} tokens accepted, {num_output_tokens} output")
        self.num_target_passes += 1
        self.num_output_tokens += num_output_tokens
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self._extend(num_draft_tokens)
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1

    def add(self, other: "SpeculationStatistics") -> None:
        """Add the counts of other passes."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_target_passes += other.num_target_passes
        self.num_output_tokens += other.num_output_tokens
        self._extend(len(other.num_accepted_tokens_per_pos))
        for position, num in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[position] += num

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens divided by drafted tokens, in [0, 1]; 0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens per verified proposal, including the recovered or bonus token; 1 if there was none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rates(self) -> list[float]:
        """For each position, the share accepted, of the proposals whose previous positions were all accepted."""
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [hit / num if num else 0.0 for hit, num in zip(self.num_accepted_tokens_per_pos, reached, strict=False)]

    def _extend(self, num_positions: int) -> None:
        missing = num_positions - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * max(0, missing)
