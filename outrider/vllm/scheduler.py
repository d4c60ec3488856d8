"""vLLM's scheduler with proposals from a `ProposalSource`. It runs in the process of vLLM's engine core.

Before a step, `update_draft_token_ids` sets the tokens that it verifies; after it, the source gets the requests' new
tokens. Structured output drops the proposed tokens that its grammar does not allow, and everything else (preemption,
prefix caching, chunked prefill, aborts, logprobs) is vLLM's own.
"""

from time import monotonic
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from outrider.vllm.making import make_source
from outrider.vllm.source import ProposalSource, Step


class DraftingScheduler(Scheduler):  # type: ignore[misc]
    """See the module.

    Attributes:
        source: where its proposals come from.
    """

    source: ProposalSource
    running: list[Request]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Make the scheduler and its source.

        Raises:
            InvalidArgument: vLLM's configuration, or a setting, does not allow proposals; one line says what does.
        """
        # First, since it checks the configuration.
        self.source = self.make_source(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        self._scheduled_at = monotonic()

    def make_source(self, vllm_config: Any) -> ProposalSource:
        """Return where proposals come from; called once, before vLLM's own scheduler is made."""
        return make_source(vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule the requests that may run; begin to draft for those that are new."""
        held = {id(request) for request in self.running if not self.source.may_run(request)}
        output = self._schedule_without(held, *args, **kwargs) if held else super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            self.source.add(self.requests[new.req_id])
        self._scheduled_at = monotonic()
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Take a step's outputs, then hand the requests' new tokens to the source."""
        step = self._step(scheduler_output, monotonic() - self._scheduled_at)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        scheduled = (self.requests.get(request_id) for request_id in scheduler_output.num_scheduled_tokens)
        self.source.advance([request for request in scheduled if request and not request.is_finished()], step)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the tokens that the next step verifies."""
        deciding: list[Request] = []
        for request_id in draft_token_ids.req_ids:
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            request.spec_token_ids = []
            if not request.is_prefill_chunk and self.source.may_run(request):
                deciding.append(request)
        proposals = self.source.propose(deciding, self.max_num_scheduled_tokens)
        for request in deciding:
            if proposed := proposals.get(request.request_id):
                tokens = list(proposed[: self.num_spec_tokens])
                request.spec_token_ids = self.structured_output_manager.validate_tokens(request, tokens)

    def shutdown(self) -> None:
        """End the source, then the scheduler."""
        self.source.close()
        super().shutdown()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.source.remove(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _schedule_without(self, held: set[int], *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule while some running requests stand aside; their places stay taken."""
        before = list(self.running)
        self.running = [request for request in before if id(request) not in held]
        self.max_num_active_reqs -= len(held)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs += len(held)
            ran = {id(request) for request in self.running}
            known = {id(request) for request in before}
            kept = [request for request in before if id(request) in ran or id(request) in held]
            self.running = kept + [request for request in self.running if id(request) not in known]

    def _step(self, output: SchedulerOutput, duration_s: float) -> Step:
        num_rows, prompts, num_verified = 0, [], 0
        for request_id, num in output.num_scheduled_tokens.items():
            num_proposed = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            request = self.requests.get(request_id)
            if num == 1 + num_proposed or request is None:
                num_rows += num
                num_verified += num_proposed
            else:
                prompts.append((num, request.num_computed_tokens - num))
        return Step(duration_s, num_rows, prompts, num_verified)
