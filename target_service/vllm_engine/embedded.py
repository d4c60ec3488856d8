"""vLLM as this engine uses it: its `LLMEngine`, and what else of it is read or changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.lm.pages import KVUsage


class Llm(Protocol):
    """The part of `vllm.v1.engine.llm_engine.LLMEngine` that is used, in one thread."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        """Add a request; return vLLM's own id of it. Raise ValueError for one that vLLM refuses."""

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        """End requests, by vLLM's own ids where `internal`."""

    def step(self) -> Sequence[Any]:
        """Run a step; return `vllm.outputs.RequestOutput` of the requests that got tokens."""


@dataclass(frozen=True, slots=True)
class EmbeddedVllm:
    """vLLM in this process.

    Attributes:
        llm: the engine.
        sampling_params: makes vLLM's `SamplingParams`.
        set_output: replaces the output of a request, by vLLM's own id, in the memory of vLLM's workers.
        kv_usage: returns the occupancy of the KV cache.
        vocabulary_size: token ids are below it.
        max_len: longest session, in tokens.
        max_rows: rows of a step, at most.
        num_speculative_tokens: proposed tokens of a request that a step verifies, at most; 0 where vLLM verifies none.
        close: ends vLLM's workers.
    """

    llm: Llm
    sampling_params: Callable[..., Any]
    set_output: Callable[[str, Sequence[int]], object]
    kv_usage: Callable[[], KVUsage]
    vocabulary_size: int
    max_len: int
    max_rows: int
    num_speculative_tokens: int
    close: Callable[[], object] = lambda: None
