"""What the engine and its scheduler exchange around a step of vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.vllm.source import EngineRequest, Step


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step.

    Attributes:
        start: position of its first row.
        num_rows: its rows.
        num_tokens: length of its text before the step.
        proposal: proposed tokens among the rows.
        is_admitted: whether it entered vLLM's batch with this step: it is new, or was preempted.
    """

    start: int
    num_rows: int
    num_tokens: int
    proposal: tuple[int, ...]
    is_admitted: bool


class StepSource:
    """A `ProposalSource` whose tokens the engine chose before the step. All ids are vLLM's own, of its requests.

    Attributes:
        lines: tokens that the next step verifies, by request.
        held: requests that take no part in the next step.
        only: the one request that takes part in steps; None for all but those that are held.
        earlier: of requests that resume with penalties of their output, the output until then; see `TargetScheduler`.
        resumed: of these, the ones whose output vLLM's scheduler has got with the last step.
        scheduled: the parts of the last step.
        num_preempted: requests that the last step preempted.
    """

    def __init__(self) -> None:
        self.lines: Mapping[str, Sequence[int]] = {}
        self.held: frozenset[str] = frozenset()
        self.only: str | None = None
        self.earlier: dict[str, tuple[int, ...]] = {}
        self.resumed: dict[str, tuple[int, ...]] = {}
        self.scheduled: dict[str, Scheduled] = {}
        self.num_preempted = 0

    def record(self, scheduled: dict[str, Scheduled], num_preempted: int) -> None:
        """Record the parts of the step that begins."""
        self.scheduled, self.num_preempted = scheduled, num_preempted

    def add(self, request: EngineRequest) -> None:
        """See `ProposalSource`; the engine has the request already."""

    def advance(self, requests: Sequence[EngineRequest], step: Step) -> None:
        """See `ProposalSource`; the engine reads vLLM's outputs."""

    def propose(self, requests: Sequence[EngineRequest], max_rows: int) -> Mapping[str, Sequence[int]]:
        """See `ProposalSource`; lines are chosen later, just before the step, with what has arrived until then."""
        return {}

    def remove(self, request_id: str) -> None:
        """Forget the output of a request that has ended before it resumed."""
        self.earlier.pop(request_id, None)

    def may_run(self, request: EngineRequest) -> bool:
        """Return whether a request may take part in the next step."""
        if self.only is not None:
            return request.request_id == self.only
        return request.request_id not in self.held

    def close(self) -> None:
        """See `ProposalSource`."""
