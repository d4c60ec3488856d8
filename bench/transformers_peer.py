"""A process that runs transformers, for comparison: `python -m bench.transformers_peer MODEL` reads JSON lines.

    {"operation": "chat", "text", "num_tokens", "num_speculative_tokens"}: prompt lookup unless the last is 0
    {"operation": "assist", "text", "num_tokens", "draft"}: assisted generation with a draft model
    {"operation": "generate", "token_ids", "num_tokens"}: one session, exactly `num_tokens` tokens
    {"operation": "batch", "prompts", "num_tokens", "timeout_s"}: all prompts, by continuous batching
    {"operation": "bandwidth"}: memory bandwidth of the device

Each line is answered with one JSON line: the result of the operation, or {"error"}.
"""

import json
import os
import sys
import time
from typing import Any, Final, TextIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.bandwidth import read_bandwidth

_PAGE_LEN: Final = 256
_GPU_SHARE: Final = 0.3
_DTYPES: Final = {"auto": "auto", "bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class Peer:
    """A transformers model and the operations on it.

    Args:
        name: folder or hub id.
        device: cpu, cuda, ...
        dtype: dtype of the weights; `auto` is the checkpoint's.
    """

    def __init__(self, name: str, device: str, dtype: str = "auto") -> None:
        self._name = name
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=_DTYPES[dtype])
        self._model = model.to(device)
        self._tokenizer: Any = None
        self._drafts: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        """Return the device, and the bytes of weights that a pass over one token reads, without untied embeddings."""
        weights = {id(parameter): parameter.nbytes for parameter in self._model.parameters()}
        embedding, head = self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight
        unread = 0 if embedding is head else embedding.nbytes
        return {"weight_bytes": sum(weights.values()) - unread, "device": str(self._model.device)}

    def chat(self, text: str, num_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        """Answer a chat message greedily; return output token ids and seconds."""
        lookup = {"prompt_lookup_num_tokens": num_speculative_tokens} if num_speculative_tokens else {}
        return self._timed(self._chat_inputs(text), max_new_tokens=num_tokens, do_sample=False, **lookup)

    def assist(self, text: str, num_tokens: int, draft: str) -> dict[str, Any]:
        """Answer a chat message greedily by assisted generation; return output token ids and seconds."""
        if draft not in self._drafts:
            model: Any = AutoModelForCausalLM.from_pretrained(draft)
            self._drafts[draft] = model.to(self._model.device)
        return self._timed(
            self._chat_inputs(text), max_new_tokens=num_tokens, do_sample=False, assistant_model=self._drafts[draft]
        )

    def generate(self, token_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """Continue token ids greedily by exactly `num_tokens`; return output token ids and seconds."""
        ids = torch.tensor([token_ids], device=self._model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return self._timed(inputs, generation_config=_endless(num_tokens))

    def batch(self, prompts: list[list[int]], num_tokens: int, timeout_s: float) -> dict[str, Any]:
        """Continue all prompts by continuous batching; return the number of tokens and seconds."""
        manager = self._model.continuous_batching_context_manager(
            generation_config=_endless(num_tokens),
            continuous_batching_config=_batching(prompts, num_tokens, str(self._model.device)),
            block=True,
            timeout=5,
        )
        with manager as batching:
            _finish(batching, prompts[:1], 2, timeout_s)
            started = time.perf_counter()
            total = _finish(batching, prompts, num_tokens, timeout_s)
            return {"num_tokens": total, "seconds": time.perf_counter() - started}

    def bandwidth(self) -> dict[str, Any]:
        """Return the memory bandwidth in bytes per second."""
        return {"bytes_per_second": read_bandwidth(self._model.device)}

    def _chat_inputs(self, text: str) -> Any:
        self._tokenizer = self._tokenizer or AutoTokenizer.from_pretrained(self._name)
        messages = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)

    def _timed(self, inputs: Any, **options: Any) -> dict[str, Any]:
        started = time.perf_counter()
        with torch.no_grad():
            output = self._model.generate(**inputs, **options)
        token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        return {"token_ids": token_ids, "seconds": time.perf_counter() - started}


def _endless(num_tokens: int) -> GenerationConfig:
    """Return the configuration of greedy decoding of exactly `num_tokens` tokens, ignoring end-of-text tokens."""
    config: Any = GenerationConfig
    made: GenerationConfig = config(do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0)
    return made


def _batching(prompts: list[list[int]], num_tokens: int, device: str) -> ContinuousBatchingConfig:
    """Return a configuration with a cache for these prompts on a CPU, where the default is over half of the memory.

    On a GPU the memory is shared with the measured target.
    """
    if device != "cpu":
        return ContinuousBatchingConfig(max_memory_percent=_GPU_SHARE)
    pages = [-(-(len(prompt) + num_tokens) // _PAGE_LEN) for prompt in prompts]
    num_pages = sum(pages) + 2 * max(pages)
    return ContinuousBatchingConfig(page_size=_PAGE_LEN, num_blocks=num_pages, max_batch_tokens=512)


def _finish(manager: Any, prompts: list[list[int]], num_tokens: int, timeout_s: float) -> int:
    """Wait until all prompts are done; return the number of output tokens."""
    give_up = time.monotonic() + timeout_s
    manager.add_requests(inputs=prompts, max_new_tokens=num_tokens)
    total = num_finished = 0
    while num_finished < len(prompts):
        result = manager.get_result(timeout=1)
        if time.monotonic() > give_up:
            raise TimeoutError(f"{len(prompts) - num_finished} of {len(prompts)} are not done after {timeout_s:g} s")
        if result is None and not manager.is_running():
            raise RuntimeError("the thread of continuous batching ended")
        if result is not None and result.error:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            num_finished += 1
            total += len(result.generated_tokens)
    return total


def _take_stdout() -> TextIO:
    """Return standard output for answers, and redirect all other output to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def main() -> None:
    """Answer every line of standard input."""
    answers = _take_stdout()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peer = Peer(sys.argv[1], device, *sys.argv[2:])
    print(json.dumps(peer.describe()), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(peer, request.pop("operation"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
