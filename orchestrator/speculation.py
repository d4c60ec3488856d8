"""How a request speculates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """What a request, or else this orchestrator, has chosen.

    Attributes:
        num_speculative_tokens: longest main line of a round; 0 for plain decoding.
        drafter: to be used; empty for any.
        max_nodes: of a proposal; 0 leaves it to the draft.
        lookahead: nodes that the draft may hold ahead of the text; 0 where it waits for verdicts.
        draft_min: shortest main line that is verified.
        draft_p_min: probability below which the draft ends a branch; None leaves it to the draft.
        max_wait_s: longest wait of the target for a proposal, in seconds.
    """

    num_speculative_tokens: int
    drafter: str = ""
    max_nodes: int = 0
    lookahead: int = 0
    draft_min: int = 0
    draft_p_min: float | None = None
    max_wait_s: float = 0.0
