"""vLLM's own server, started as its users start it, with a draft of ours: texts, metrics, and a draft that dies."""

import asyncio
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.lm.embedded import ensure_embedded
from tests.vllm.real import PYTHON, remote_draft

pytestmark = [pytest.mark.vllm, pytest.mark.embedded, pytest.mark.timeout(900)]

SPECULATIVE = '{"method": "custom_class", "model": "outrider.vllm.NoProposals", "num_speculative_tokens": 5}'
PROMPT = "one two three four one two three four one two three four one two"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def complete(base: str, prompt: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def value(metrics: str, name: str) -> float:
    """Returns the sum of a metric's samples."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    assert lines, f"there is no {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@asynccontextmanager
async def served(log: Path, *arguments: str, **variables: str) -> AsyncIterator[str]:
    """vLLM's server; yields its address."""
    port = free_port()
    command = [os.path.abspath(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(ensure_embedded())]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"]
    command += ["--dtype", "float32", "--enforce-eager", *arguments]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")},
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    with log.open("w") as out:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=out, stderr=out)
    base = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(400):
            while True:
                assert process.returncode is None, log.read_text()[-3000:]
                try:
                    await asyncio.to_thread(get, f"{base}/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    await asyncio.sleep(0.5)
        yield base
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_a_server_gets_its_proposals_from_a_draft_and_outlives_it(tmp_path: Path) -> None:
    metrics_port = free_port()
    async with remote_draft("", "ngram") as draft:
        options = ("--scheduler-cls", "outrider.vllm.DraftingScheduler", "--speculative-config", SPECULATIVE)
        places = {"OUTRIDER_DRAFTS": draft.address, "OUTRIDER_METRICS_ADDRESS": f"127.0.0.1:{metrics_port}"}
        async with served(tmp_path / "log", *options, **places) as base:
            first = await asyncio.to_thread(complete, base, PROMPT)
            second = await asyncio.to_thread(complete, base, PROMPT)
            assert first["choices"][0]["text"] == second["choices"][0]["text"]
            of_vllm = await asyncio.to_thread(get, f"{base}/metrics")
            own = await asyncio.to_thread(get, f"http://127.0.0.1:{metrics_port}/metrics")
            accepted = value(own, "outrider_vllm_accepted_tokens_total")
            assert accepted > 0
            assert value(of_vllm, "vllm:spec_decode_num_accepted_tokens_total") == accepted
            assert value(own, "outrider_vllm_drafts_connected") == 1
            draft.kill()
            third = await asyncio.to_thread(complete, base, PROMPT)
            assert third["choices"][0]["text"] == first["choices"][0]["text"]


async def test_a_setting_that_is_missing_ends_the_start_with_its_name(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--scheduler-cls", "outrider.vllm.DraftingScheduler", "--speculative-config", SPECULATIVE)
    with pytest.raises(AssertionError):
        async with served(log, *options):
            pass
    assert "InvalidArgument" in log.read_text()
    assert "OUTRIDER_DRAFTS: " in log.read_text()
