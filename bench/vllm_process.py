"""A vLLM engine for `bench.vllm` and its tests: runs in vLLM's environment, takes work as JSON lines and answers so.

    python -m bench.vllm_process '{"model": "FOLDER", "drafts": "remote"}'

The engine runs in this process, so that the proposal source and its times can be read. A step can be given a least
time, as a larger model on a device has: the thread sleeps for the rest of it.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

_NO_PROPOSALS = "outrider.vllm.NoProposals"
_OWN_DRAFT = "bench.vllm_own_draft.OwnDraft"


class Engine:
    """A vLLM engine, and what is read of it.

    Args:
        options: `model`; `drafts` (none, remote, own); `num_speculative_tokens`; `step_s`; `engine`, vLLM's arguments.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._step_s = float(options.get("step_s", 0.0))
        arguments: dict[str, Any] = {"model": options["model"], "disable_log_stats": True, **options.get("engine", {})}
        drafts = options.get("drafts", "none")
        if drafts != "none":
            arguments["speculative_config"] = {
                "method": "custom_class",
                "model": _OWN_DRAFT if drafts == "own" else _NO_PROPOSALS,
                "num_speculative_tokens": options.get("num_speculative_tokens", 5),
            }
        if drafts == "remote":
            arguments["scheduler_cls"] = options.get("scheduler", "outrider.vllm.DraftingScheduler")
        self._llm = LLM(**arguments)
        core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._source: Any = getattr(core.scheduler, "source", None)
        self._durations_s: list[float] = []
        self._num_preemptions = 0
        self._watch(core.model_executor)

    def run(self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], *, together: bool) -> dict[str, Any]:
        """Generate; return the outputs, and what changed meanwhile.

        Args:
            prompts: token ids of each.
            sampling: fields of vLLM's `SamplingParams`; those of each prompt where `each` has a list of them.
            together: whether all prompts run at once, or one after another.
        """
        from vllm import SamplingParams

        each = sampling.pop("each", [{}] * len(prompts))
        parameters = [SamplingParams(**_parsed(sampling | own), detokenize=False) for own in each]
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        before = asdict(self._source.counts) if hasattr(self._source, "counts") else {}
        self._durations_s.clear()
        self._num_preemptions = 0
        if hasattr(self._source, "overheads_s"):
            self._source.overheads_s.clear()
        began = time.perf_counter()
        pairs = zip(given, parameters, strict=True)
        batches = [(given, parameters)] if together else [([one], [own]) for one, own in pairs]
        outputs = [item for batch, own in batches for item in self._llm.generate(batch, own, use_tqdm=False)]
        duration_s = time.perf_counter() - began
        counts = {}
        if before:
            counts = {name: _less(value, before[name]) for name, value in asdict(self._source.counts).items()}
        return {
            "duration_s": duration_s,
            "token_ids": [list(item.outputs[0].token_ids) for item in outputs],
            "finish": [item.outputs[0].finish_reason for item in outputs],
            "counts": counts,
            "overheads_s": list(getattr(self._source, "overheads_s", ())),
            "steps_s": list(self._durations_s),
            "num_preemptions": self._num_preemptions,
            "gaps": [_gaps(item.outputs[0].logprobs) for item in outputs],
        }

    def wait_for_drafts(self, num: int, timeout_s: float = 30.0) -> int:
        """Return the number of drafts in rotation once there are `num`, or after a time."""
        until = time.monotonic() + timeout_s
        while self._source.thread.num_connected < num and time.monotonic() < until:
            time.sleep(0.01)
        return int(self._source.thread.num_connected)

    def _watch(self, executor: Any) -> None:
        """Record the time of each step's computation, and make it as long as it is to be."""
        runner = executor.driver_worker.worker.model_runner
        execute = runner.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = execute(scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens:
                time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))
                self._durations_s.append(time.perf_counter() - began)
            return result

        runner.execute_model = timed
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted


def _gaps(logprobs: Any) -> list[float]:
    """Return the difference of the two highest log-probabilities at each position, where they were requested."""
    found = []
    for position in logprobs or ():
        highest = sorted((item.logprob for item in position.values()), reverse=True)
        found.append(highest[0] - highest[1])
    return found


def _less(after: Any, before: Any) -> Any:
    return (
        [one - other for one, other in zip(after, before, strict=True)] if isinstance(after, list) else after - before
    )


def _parsed(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters with a JSON schema as vLLM takes it."""
    if (schema := sampling.pop("json_schema", None)) is None:
        return sampling
    from vllm.sampling_params import StructuredOutputsParams

    return sampling | {"structured_outputs": StructuredOutputsParams(json=schema)}


def main() -> None:
    """Make the engine, then answer each line."""
    answers = os.fdopen(os.dup(1), "w")
    # What libraries print goes elsewhere.
    os.dup2(2, 1)
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        if "drafts" in work:
            answer: dict[str, Any] = {"drafts": engine.wait_for_drafts(work["drafts"])}
        else:
            answer = engine.run(work["prompts"], work["sampling"], together=work.get("together", False))
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
