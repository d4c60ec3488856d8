"""What the tests with vLLM itself share: its environment, a draft of ours, and an engine."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.remote_draft import remote_draft
from bench.vllm_engine import VllmEngine

PYTHON = os.environ.get("OUTRIDER_TEST_VLLM", ".venv-vllm/bin/python")
SMALL = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 512}
REAL = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16}


@asynccontextmanager
async def engine(
    model: str | Path, log: Path, *addresses: str, options: Mapping[str, Any] | None = None, **variables: str
) -> AsyncIterator[VllmEngine]:
    """A vLLM engine; with addresses, one that gets proposals from these drafts, which are connected."""
    settings: dict[str, Any] = {"model": str(model), "num_speculative_tokens": 5, **(options or {})}
    if addresses:
        settings["drafts"] = "remote"
        variables["OUTRIDER_DRAFTS"] = ",".join(addresses)
    module = settings.pop("module", "bench.vllm_process")
    async with VllmEngine(settings, python=PYTHON, variables=variables, log=log, module=module) as running:
        if addresses:
            assert await running.wait_for_drafts(len(addresses)) == len(addresses)
        yield running


__all__ = ["PYTHON", "REAL", "SMALL", "engine", "remote_draft"]
