"""What a round gave."""

from dataclasses import dataclass

from outrider.parameters import FinishReason
from outrider.tokens import TokenLogprobs, TokenOrigin


@dataclass(frozen=True, slots=True)
class RoundAbout:
    """What there is to say of a round beside its result; see Verdict.

    Attributes:
        model_time_s: seconds of its pass, for all sessions.
        wait_time_s: seconds that it waited for a proposal.
        queue_time_s: seconds that it was ready before its pass began.
        expected_time_s: seconds that the controller expected the round to take; 0 where it knew nothing.
        num_recomputed: output tokens that were run again before it.
        hit: whether the last token was among the nodes that had arrived.
        num_proposed: nodes that arrived since the last verdict.
        num_wanted: length of the main line that the draft should propose now; 0 where it should not.
        lookahead: nodes that the draft should hold ahead of the text, at most.
    """

    model_time_s: float
    wait_time_s: float
    queue_time_s: float
    expected_time_s: float
    num_recomputed: int
    hit: bool
    num_proposed: int
    num_wanted: int
    lookahead: int


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a pass gave a session, cut where the request ends.

    Attributes:
        token_ids: output tokens.
        origins: how each came to be.
        kept_path: accepted nodes whose KV stays; the last output token has none yet.
        logprobs: of each output token, where asked for.
        num_draft_tokens: main-line length that was verified.
        num_accepted: proposed tokens among the output.
        num_nodes: nodes verified.
        finish_reason: why the request ends with the last token; None where it goes on.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    kept_path: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_draft_tokens: int
    num_accepted: int
    num_nodes: int
    finish_reason: FinishReason | None
