"""Requests as vLLM's scheduler has them, and an engine that verifies proposals as vLLM does, without a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from outrider.vllm.source import ProposalSource, Step
from tests.orchestrator.scripted import counting


def sampling(**changes: Any) -> SimpleNamespace:
    """Sampling parameters with the fields of vLLM's that the plug-in reads."""
    values = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "all_stop_token_ids": {2},
    }
    return SimpleNamespace(**values | changes)


@dataclass
class FakeRequest:
    """A request of vLLM."""

    request_id: str
    prompt_token_ids: Sequence[int] | None = (5, 6, 7)
    max_tokens: int = 40
    cache_salt: str | None = None
    sampling_params: Any = field(default_factory=sampling)
    mm_features: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids or ())
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]


class FakeEngine:
    """Steps requests as vLLM does: proposes, verifies, appends, and tells the source.

    Attributes:
        num_steps: steps so far.
        proposals: of each step, by request.
    """

    def __init__(
        self,
        source: ProposalSource,
        requests: Sequence[FakeRequest],
        next_token: Callable[[list[int]], int] = counting,
        step_s: float = 0.02,
    ) -> None:
        self.source = source
        self.requests = list(requests)
        self.next_token = next_token
        self.step_s = step_s
        self.num_steps = 0
        self.proposals: list[dict[str, Sequence[int]]] = []
        for request in requests:
            source.add(request)

    def step(self) -> None:
        """Run a step for all requests that have not ended."""
        running = [request for request in self.requests if len(request.output) < request.max_tokens]
        proposed = dict(self.source.propose(running, 256)) if self.num_steps else {}
        self.proposals.append(proposed)
        for request in running:
            for token_id in [*proposed.get(request.request_id, ()), None]:
                request.all_token_ids.append(self.next_token(request.all_token_ids))
                if request.all_token_ids[-1] != token_id or len(request.output) == request.max_tokens:
                    break
        num_verified = sum(map(len, proposed.values()))
        going_on = [request for request in running if len(request.output) < request.max_tokens]
        self.source.advance(going_on, Step(self.step_s, len(running) + num_verified, (), num_verified))
        for request in running:
            if request not in going_on:
                self.source.remove(request.request_id)
        self.num_steps += 1

    def run(self, pause: Callable[[], object] = lambda: None) -> None:
        """Run steps until every request has ended; `pause` is called after each."""
        while any(len(request.output) < request.max_tokens for request in self.requests):
            self.step()
            pause()
