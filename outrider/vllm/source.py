"""What a scheduler of vLLM asks for proposals, and what it tells of its steps. No module here imports vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class EngineRequest(Protocol):
    """The parts of `vllm.v1.request.Request` that sources read."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    cache_salt: str | None
    sampling_params: Any
    prompt_token_ids: Sequence[int] | None
    mm_features: Sequence[Any]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Token ids of prompt and output."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of vLLM's engine.

    Attributes:
        duration_s: seconds from the end of its scheduling to its outputs.
        num_rows: rows that decode, proposed tokens included.
        prompts: of each part of a prompt its number of rows, and the position of the first.
        num_verified: proposed tokens that were verified.
    """

    duration_s: float
    num_rows: int
    prompts: Sequence[tuple[int, int]]
    num_verified: int


class ProposalSource(Protocol):
    """Where a scheduler's proposals come from. All methods are called in the thread of vLLM's engine."""

    def add(self, request: EngineRequest) -> None:
        """Take a request that runs from now on."""

    def advance(self, requests: Sequence[EngineRequest], step: Step) -> None:
        """Take a step, with the requests that it gave tokens and that go on."""

    def propose(self, requests: Sequence[EngineRequest], max_rows: int) -> Mapping[str, Sequence[int]]:
        """Return the tokens that the next step verifies, by request; may wait for them.

        Args:
            requests: those that decode in the next step.
            max_rows: rows of the step, at most.
        """

    def remove(self, request_id: str) -> None:
        """Drop a request that has ended."""

    def may_run(self, request: EngineRequest) -> bool:
        """Return whether a request may take part in the next step."""

    def close(self) -> None:
        """End; no method is called any more."""
