"""A request of vLLM that is drafted for, and the counts over all of them."""

from dataclasses import dataclass, field

from outrider.control.draft_times import DraftTimes
from outrider.speculation.acceptance import AcceptanceRates
from outrider.speculation.received_tree import ReceivedTree
from outrider.vllm.source import EngineRequest


@dataclass(slots=True)
class SourceCounts:
    """Counts since the start.

    Attributes:
        num_steps: steps of vLLM.
        num_proposed: tokens that arrived.
        num_verified: of these, those that vLLM verified.
        num_accepted: of these, those that it accepted.
        verified_at: of the verified tokens, how many were the first, second, ... of their proposal.
        accepted_at: of the accepted ones, likewise.
        wait_s: seconds that steps waited for proposals.
        num_waits: steps that waited.
        num_silent_waits: of these, those in which nothing arrived.
    """

    num_steps: int = 0
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    wait_s: float = 0.0
    num_waits: int = 0
    num_silent_waits: int = 0


@dataclass(slots=True, eq=False)
class Drafted:
    """A request that is drafted for.

    Attributes:
        request: of vLLM.
        received: the proposal, as far as it has arrived.
        rates: acceptance rates of its draft.
        times: of the draft's answers.
        num_tokens: tokens of the request that the tree has followed.
        num_sent: of these, those that the draft was sent.
        is_paused: whether the draft was told to propose nothing; then it is sent nothing until it is to propose again.
        asked_at: monotonic time at which the last of them were sent.
        arrived_at: monotonic time of the last part of the proposal.
        is_answering: whether the draft's answer to them has begun to arrive.
        num_rounds: steps that gave it tokens.
        is_open: whether its draft had it open in the last round.
        num_empty: rounds in a row in which its draft had it open, and nothing that it had proposed could be verified.
        verified: proposed tokens that the step in progress verifies.
    """

    request: EngineRequest
    received: ReceivedTree
    rates: AcceptanceRates
    times: DraftTimes
    num_tokens: int
    num_sent: int
    asked_at: float
    arrived_at: float = 0.0
    is_answering: bool = False
    is_paused: bool = False
    num_rounds: int = 0
    is_open: bool = False
    num_empty: int = 0
    verified: tuple[int, ...] = ()
