"""A vLLM engine in a process of its own, in vLLM's environment, for `bench.vllm` and its tests."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bench.result import median
from outrider.errors import InvalidArgument, Unavailable

PYTHON: Final = ".venv-vllm/bin/python"
_ROOT: Final = Path(__file__).parents[1]
_LINE_BYTES: Final = 256 << 20
_START_S: Final = 300.0
_END_S: Final = 20.0


class VllmEngine:
    """Starts the process on entry, and ends it on exit.

    Args:
        options: see `bench.vllm_process.Engine`.
        python: of vLLM's environment, which `make vllm` makes.
        variables: of its environment, besides.
        cores: that it may use; None for all.
        log: file that gets what it prints.
        module: that is run.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        python: str = PYTHON,
        variables: Mapping[str, str] | None = None,
        cores: Sequence[int] | None = None,
        log: Path | None = None,
        module: str = "bench.vllm_process",
    ) -> None:
        self._options = options
        self._python = python
        self._variables = variables or {}
        self._cores = cores
        self._log = log
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        if not Path(self._python).exists():
            raise InvalidArgument(f"there is no {self._python}: `make vllm` makes vLLM's environment", "python")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        threads = str(len(self._cores)) if self._cores else str(os.cpu_count())
        environment = {**inherited, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(_ROOT), **self._variables}
        if self._cores:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._cores))
        with self._log.open("a") if self._log else nullcontext() as log:
            self._process = await asyncio.create_subprocess_exec(
                os.path.abspath(self._python),
                "-m",
                self._module,
                json.dumps(self._options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                limit=_LINE_BYTES,
                preexec_fn=(lambda: os.sched_setaffinity(0, set(self._cores or ()))) if self._cores else None,
            )
        async with asyncio.timeout(_START_S):
            await self._answer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (process := self._process) is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def run(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any], *, together: bool = False
    ) -> dict[str, Any]:
        """Generate; see `bench.vllm_process.Engine.run`."""
        return await self._ask({"prompts": prompts, "sampling": sampling, "together": together})

    async def wait_for_drafts(self, num: int) -> int:
        """Return the number of drafts in rotation, once there are so many."""
        return int((await self._ask({"drafts": num}))["drafts"])

    async def _ask(self, work: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(work).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        if not (line := await self._process.stdout.readline()):
            raise Unavailable("the vLLM process ended; its log says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def rate(*results: Mapping[str, Any]) -> float:
    """Return the tokens per second of some runs' results."""
    num_tokens = sum(len(token_ids) for result in results for token_ids in result["token_ids"])
    return num_tokens / sum(float(result["duration_s"]) for result in results)


def over_plain(ratios: Sequence[float]) -> dict[str, float]:
    """Return the fields of a row that state pairs' rates over plain vLLM's."""
    return {"rate_over_plain": median(ratios), "lowest_over_plain": min(ratios), "highest_over_plain": max(ratios)}
