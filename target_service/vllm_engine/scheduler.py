"""vLLM's scheduler with the proposals of orchestrators, and with closed windows."""

from time import monotonic
from typing import Any, ClassVar

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from outrider.vllm.making import check
from outrider.vllm.scheduler import DraftingScheduler
from target_service.vllm_engine.steps import Scheduled, StepSource


class TargetScheduler(DraftingScheduler):
    """Schedules the requests that the engine lets run, each with the line that it chose.

    vLLM counts the tokens for presence and frequency penalties, and follows a grammar, from the output of its own
    request, and a request that resumes (after a failover, or a span that truncates) begins with output. Such a request
    enters with the prompt alone. The token of its first step is dropped, it is preempted, and it gets its output before
    it is scheduled again: from there on it is as if it had been preempted in the middle of its text.

    Attributes:
        shared: the source of the next scheduler that is made; vLLM makes it, and takes no object for it.
    """

    shared: ClassVar[StepSource]
    source: StepSource

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._prompts_run: list[Request] = []

    def make_source(self, vllm_config: Any) -> StepSource:
        """Return the engine's source."""
        if vllm_config.speculative_config is not None:
            check(vllm_config)
        return self.shared

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule the requests that may run, and record their parts."""
        held = [request for request in self.waiting if not self.source.may_run(request)]
        self.waiting.remove_requests(held)
        for request in self.running:
            self._set_line(request)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            for request in reversed(held):
                self.waiting.prepend_request(request)
        admitted = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        parts = {}
        for request_id, num_rows in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            proposed = output.scheduled_spec_decode_tokens.get(request_id, ())
            parts[request_id] = Scheduled(
                start=request.num_computed_tokens - num_rows,
                num_rows=num_rows,
                num_tokens=request.num_tokens,
                # vLLM fills up some requests to a common number of rows, with -1.
                proposal=tuple(token_id for token_id in proposed if token_id >= 0),
                is_admitted=request_id in admitted,
            )
        self.source.record(parts, len(output.preempted_req_ids or ()))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Take a step's outputs; requests that resume get their earlier output."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        prompts_run, self._prompts_run = self._prompts_run, []
        for request in prompts_run:
            self._resume(request)
        return outputs

    def _set_line(self, request: Request) -> None:
        is_decoding = request.num_tokens - request.num_computed_tokens == 1
        line = self.source.lines.get(request.request_id, ()) if is_decoding else ()
        tokens = list(line[: self.num_spec_tokens])
        request.spec_token_ids = self.structured_output_manager.validate_tokens(request, tokens) if tokens else []

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        if request.request_id in self.source.earlier:
            self._prompts_run.append(request)
            return [], False
        result: tuple[list[int], bool] = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        return result

    def _resume(self, request: Request) -> None:
        token_ids = self.source.earlier.pop(request.request_id)
        self.running = [other for other in self.running if other is not request]
        self._preempt_request(request, monotonic())
        # Else its tokens would not be sent to the workers, as those of a request that they have just run.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        request.append_output_token_ids(list(token_ids))
        structured = request.structured_output_request
        if structured is not None and structured.grammar is not None:
            structured.grammar.accept_tokens(request.request_id, list(token_ids))
        self.source.resumed[request.request_id] = token_ids
