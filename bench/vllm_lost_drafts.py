"""The lost drafts of `bench.vllm`: the embedded model in vLLM, greedily, with and without a draft that fails.

The draft was killed, is stopped, is slow, or proposes ids outside the vocabulary. vLLM has one core; the draft, the
delaying proxy and the benchmark have the other. Runs with and without it alternate.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from bench.progress import Step
from bench.prompts import VARIED
from bench.proxy import proxied
from bench.remote_draft import remote_draft
from bench.stub_workers import WrongDraft
from bench.vllm_engine import VllmEngine, over_plain, rate
from outrider.lm.embedded import ensure_embedded
from outrider.v1 import draft_pb2_grpc, worker_pb2_grpc

FAULTS: Final = ("killed", "stopped", "slow", "wrong ids")
_SLOW_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class LostDraft:
    """Pairs of measurements whose draft fails.

    Attributes:
        fault: one of `FAULTS`.
        num_speculative_tokens: tokens that a step verifies of a request, at most.
        num_pairs: pairs, with and without the draft.
        num_runs: runs of each measurement; those of a pair alternate, so that both see the same minutes of the machine.
        num_tokens: output tokens of a run.
        python: of vLLM's environment.
    """

    fault: str
    num_speculative_tokens: int
    num_pairs: int
    num_runs: int
    num_tokens: int
    python: str


async def measure_lost(options: LostDraft, folder: Path, core: int, step: Step) -> dict[str, Any]:
    """Return a row of the benchmark: the rate with a draft that fails, over vLLM alone."""
    target = str(ensure_embedded())
    engine = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "enable_prefix_caching": False}
    sampling = {"temperature": 0.0, "max_tokens": options.num_tokens, "ignore_eos": True}
    fault = options.fault
    log = folder / f"{fault.replace(' ', '-')}.log"
    async with AsyncExitStack() as stack:
        address, begin = await stack.enter_async_context(_failing(fault))
        plain = await stack.enter_async_context(
            VllmEngine({"model": target, "engine": engine}, python=options.python, cores=[core], log=log)
        )
        remote = await stack.enter_async_context(
            VllmEngine(
                {
                    "model": target,
                    "engine": engine,
                    "drafts": "remote",
                    "num_speculative_tokens": options.num_speculative_tokens,
                },
                python=options.python,
                variables={"OUTRIDER_DRAFTS": address},
                cores=[core],
                log=log,
            )
        )
        prompts = _token_ids(target)
        await remote.wait_for_drafts(1)
        for each in (plain, remote):
            await each.run(prompts[:1], dict(sampling))
        begin()
        ratios, same = [], []
        for pair in range(options.num_pairs):
            step(f"draft {fault}")
            found: dict[str, list[dict[str, Any]]] = {"plain": [], "remote": []}
            for number in range(options.num_runs):
                prompt = [prompts[(pair * options.num_runs + number) % len(prompts)]]
                order = [("plain", plain), ("remote", remote)]
                for name, each in order if (pair + number) % 2 else reversed(order):
                    found[name].append(await each.run(prompt, dict(sampling)))
            ratios.append(rate(*found["remote"]) / rate(*found["plain"]))
            pairs = zip(found["remote"], found["plain"], strict=True)
            same += [one["token_ids"] == other["token_ids"] for one, other in pairs]
    return {
        "mode": fault,
        "rtt_ms": None,
        "tokens_per_s": rate(*found["remote"]),
        "tokens_per_step": None,
        "acceptance_rate": None,
        "wait_per_step_ms": None,
        **over_plain(ratios),
        "same_text": all(same),
    }


@asynccontextmanager
async def _failing(fault: str) -> AsyncIterator[tuple[str, Any]]:
    """Yield the address of a draft that works, and what makes it fail."""
    if fault == "wrong ids":
        async with _served(WrongDraft()) as address:
            yield address, lambda: None
        return
    async with remote_draft("", "ngram") as draft, proxied(draft.address) as proxy:

        def slow() -> None:
            proxy.up.latency_s = proxy.down.latency_s = _SLOW_S

        begin = {
            "killed": draft.kill,
            "stopped": lambda: os.kill(draft.pid, signal.SIGSTOP),
            "slow": slow,
        }[fault]
        yield proxy.address, begin


@asynccontextmanager
async def _served(draft: WrongDraft) -> AsyncIterator[str]:
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(draft, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _token_ids(folder: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.encode(text) for text in VARIED[:5]]
