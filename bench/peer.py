"""A client of the transformers process of `bench.transformers_peer`."""

import asyncio
import json
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from outrider.errors import OutriderError

_LOADING_S: Final = 600.0
_ANSWER_S: Final = 300.0
_MAX_LINE_BYTES: Final = 1 << 22


class TransformersPeer:
    """A transformers process with a protocol of JSON lines; every wait has a timeout.

    Attributes:
        weight_bytes: bytes of weights that decoding one token reads.

    Args:
        name: folder or hub id of the model.
        dtype: dtype of the weights; empty for the checkpoint's.
    """

    def __init__(self, name: str, dtype: str = "") -> None:
        self._arguments = [name, *([dtype] if dtype else [])]
        self.weight_bytes = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.transformers_peer",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MAX_LINE_BYTES,
        )
        try:
            self.weight_bytes = (await self._answer(_LOADING_S))["weight_bytes"]
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def chat(self, text: str, num_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        """Return `token_ids` and `seconds`; speculate by prompt lookup if `num_speculative_tokens` is not 0."""
        return await self._call("chat", text=text, num_tokens=num_tokens, num_speculative_tokens=num_speculative_tokens)

    async def assist(self, text: str, num_tokens: int, draft: str) -> dict[str, Any]:
        """Return `token_ids` and `seconds` of assisted generation with the draft model in a folder."""
        return await self._call("assist", text=text, num_tokens=num_tokens, draft=draft)

    async def generate(self, token_ids: Sequence[int], num_tokens: int) -> float:
        """Return the seconds that one session takes for exactly `num_tokens` tokens."""
        return float((await self._call("generate", token_ids=list(token_ids), num_tokens=num_tokens))["seconds"])

    async def batch(self, prompts: Sequence[Sequence[int]], num_tokens: int, timeout_s: float) -> float:
        """Return the output tokens per second of all prompts together, by continuous batching."""
        lists = [list(prompt) for prompt in prompts]
        # Twice, because the first pass warms up.
        answer = await self._call("batch", 2 * timeout_s, prompts=lists, num_tokens=num_tokens, timeout_s=timeout_s)
        return float(answer["num_tokens"] / answer["seconds"])

    async def bandwidth(self) -> float:
        """Return the memory bandwidth of the device, in bytes per second."""
        return float((await self._call("bandwidth"))["bytes_per_second"])

    async def _call(self, operation: str, within_s: float = _ANSWER_S, **arguments: Any) -> dict[str, Any]:
        """Return the answer of an operation; raise `OutriderError` on an error or timeout."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the peer has no pipes")
        stdin.write(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
        return await self._answer(within_s)

    async def _answer(self, within_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise RuntimeError("the peer has no pipes")
        try:
            line = await asyncio.wait_for(stdout.readline(), within_s)
        except TimeoutError:
            # A late answer would be taken for that of a later call.
            self._process.kill()
            raise OutriderError(f"transformers did not answer within {within_s:g} s") from None
        if not line:
            raise OutriderError("the transformers process ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OutriderError(f"transformers: {answer['error']}")
        return answer
