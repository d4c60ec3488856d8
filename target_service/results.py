"""What a round gave."""

from dataclasses import dataclass

from outrider.parameters import FinishReason
from outrider.tokens import TokenLogprobs, TokenOrigin


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
