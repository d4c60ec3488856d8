"""A target that several processes run together, started by a stack."""

import asyncio
from pathlib import Path

import pytest

from outrider.client import GenerationRequest
from outrider.local.stack import LocalStack
from outrider.local.stack_options import StackOptions
from outrider.parameters import SamplingParameters
from tests.lm.models import CONFIGS, save_model

pytestmark = pytest.mark.slow


def ranks_below(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in children for child in path.read_text().split()]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.timeout(240)
async def test_ranks_serve_as_one_target_and_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_COMPILE", "no")
    folder = save_model(CONFIGS["llama"], tmp_path / "model")
    options = StackOptions(model=folder, drafts=(), device="cpu", tensor_parallel=2)
    request = GenerationRequest(token_ids=[5, 9, 30], parameters=SamplingParameters(max_tokens=4, ignore_eos=True))
    async with LocalStack(options) as stack, stack.client() as client:
        assert len((await client.complete(request)).token_ids) == 4
        ranks = ranks_below(stack.targets[0].pid)
        assert len(ranks) == 2
        # As a crash of torchrun: its ranks must not stay.
        stack.targets[0].kill()
        async with asyncio.timeout(30):
            while any(map(is_alive, ranks)):
                await asyncio.sleep(0.1)
