"""The way of requests into vLLM and out of it, and requests of the engine's own: the warm-up and the probe."""

from collections.abc import Sequence
from typing import Any, Final

from outrider.serving.session_failures import EngineFailed
from target_service.vllm_engine.embedded import EmbeddedVllm
from target_service.vllm_engine.parameters import needs_output, sampling_arguments
from target_service.vllm_engine.requests import VllmRequest
from target_service.vllm_engine.steps import StepSource

_MAX_STEPS: Final = 64
"""Steps after which a request of the engine's own has failed; it needs one for each token and one for its prompt."""
_WARM_UP_TOKENS: Final = (0, 1, 0, 1)
_WARM_UP_LEN: Final = 3


class Entrance:
    """Makes requests of this engine requests of vLLM, and ends them there.

    Args:
        vllm: vLLM in this process.
        source: what engine and scheduler exchange.
    """

    def __init__(self, vllm: EmbeddedVllm, source: StepSource) -> None:
        self._vllm = vllm
        self._source = source

    def enter(self, request: VllmRequest) -> None:
        """Make a request one of vLLM: its whole text is the prompt, unless its output counts by itself.

        Raises:
            ValueError: vLLM refuses it.
        """
        token_ids = request.resident.token_ids
        earlier = tuple(token_ids[request.prompt_len :]) if needs_output(request) else ()
        arguments = sampling_arguments(request, len(earlier), self._vllm.max_len)
        request.num_entries += 1
        key = f"{request.number}.{request.num_entries}"
        prompt = token_ids[: len(token_ids) - len(earlier)]
        request.vllm_id = self._add(key, prompt, arguments, request.cache_salt)
        request.key, request.is_prefilling, request.num_run = key, True, 0
        if earlier:
            self._source.earlier[request.vllm_id] = earlier

    def leave(self, request: VllmRequest) -> None:
        """End vLLM's request, if there is one."""
        if request.is_inside:
            self._vllm.llm.abort_request([request.vllm_id], internal=True)
            self.forget(request)

    def forget(self, request: VllmRequest) -> None:
        """Record that a request has ended within vLLM."""
        self._source.earlier.pop(request.vllm_id, None)
        request.key, request.is_prefilling, request.num_run = "", True, 0

    def probe(self) -> None:
        """Run one token, and nothing else; raise `EngineFailed` if vLLM fails at it."""
        self._run_alone([0], {"temperature": 0.0, "max_tokens": 1}, ())

    def warm_up(self) -> None:
        """Run prompt, decoding, drawing and verification once; raise `EngineFailed` if vLLM fails at it."""
        line = _WARM_UP_TOKENS[: min(self._vllm.num_speculative_tokens, _WARM_UP_LEN - 1)]
        for temperature in (0.0, 1.0):
            arguments = {"temperature": temperature, "max_tokens": _WARM_UP_LEN, "seed": 1, "logprobs": 1}
            self._run_alone(_WARM_UP_TOKENS, arguments, line)

    def _run_alone(self, token_ids: Sequence[int], arguments: dict[str, Any], line: Sequence[int]) -> None:
        source, llm = self._source, self._vllm.llm
        try:
            vllm_id = self._add("own", token_ids, {"ignore_eos": True, **arguments})
            source.only, source.lines = vllm_id, {vllm_id: line}
            for _ in range(_MAX_STEPS):
                if any(output.request_id == "own" and output.finished for output in llm.step()):
                    return
            raise EngineFailed("vLLM did not finish a request of one token")
        except EngineFailed:
            raise
        except Exception as error:
            raise EngineFailed("a step of vLLM over a request of the engine's own failed") from error
        finally:
            source.only, source.lines = None, {}

    def _add(self, key: str, token_ids: Sequence[int], arguments: dict[str, Any], salt: bytes = b"") -> str:
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(token_ids)}
        if salt:
            prompt["cache_salt"] = salt.hex()
        return self._vllm.llm.add_request(key, prompt, self._vllm.sampling_params(**arguments))
