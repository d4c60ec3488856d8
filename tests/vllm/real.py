"""What the tests with vLLM itself share: its environment, a draft of ours, and an engine."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from bench import remote_draft as drafts
from bench.vllm_engine import VllmEngine
from outrider.local.process import ServiceProcess

# Not left in the environment: services that inherit it refuse variables of their prefix that they do not know.
PYTHON = os.environ.pop("OUTRIDER_TEST_VLLM", ".venv-vllm/bin/python")
DISTILLED = str(Path(PYTHON).absolute().parents[1] / "draft")
"""A draft of few layers, which `make vllm` distills from the embedded model."""
CORES = sorted(os.sched_getaffinity(0))
VLLM_CORE, DRAFT_CORE = CORES[0], CORES[-1]
SMALL = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 512}
REAL = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16}


@asynccontextmanager
async def engine(
    model: str | Path, log: Path, *addresses: str, options: Mapping[str, Any] | None = None, **variables: str
) -> AsyncIterator[VllmEngine]:
    """A vLLM engine on a core of its own; with addresses, one that gets proposals from these drafts, all connected."""
    settings: dict[str, Any] = {"model": str(model), "num_speculative_tokens": 5, **(options or {})}
    if addresses:
        settings["drafts"] = "remote"
        variables["OUTRIDER_DRAFTS"] = ",".join(addresses)
    module = settings.pop("module", "bench.vllm_process")
    async with VllmEngine(
        settings, python=PYTHON, variables=variables, cores=[VLLM_CORE], log=log, module=module
    ) as running:
        if addresses:
            assert await running.wait_for_drafts(len(addresses)) == len(addresses)
        yield running


def remote_draft(model: str, drafter: str = "model", **settings: object) -> AbstractAsyncContextManager[ServiceProcess]:
    """A draft service on a core of its own; see `bench.remote_draft`."""
    return drafts.remote_draft(model, drafter, cores=[DRAFT_CORE], **settings)
