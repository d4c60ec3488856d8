"""A proposal source without proposals."""

from collections.abc import Mapping, Sequence

from outrider.vllm.source import EngineRequest, Step


class NoSource:
    """A `ProposalSource` that proposes nothing: vLLM decodes plainly."""

    def add(self, request: EngineRequest) -> None:
        """See `ProposalSource`."""

    def advance(self, requests: Sequence[EngineRequest], step: Step) -> None:
        """See `ProposalSource`."""

    def propose(self, requests: Sequence[EngineRequest], max_rows: int) -> Mapping[str, Sequence[int]]:
        """See `ProposalSource`."""
        return {}

    def remove(self, request_id: str) -> None:
        """See `ProposalSource`."""

    def may_run(self, request: EngineRequest) -> bool:
        """See `ProposalSource`."""
        return True

    def close(self) -> None:
        """See `ProposalSource`."""
