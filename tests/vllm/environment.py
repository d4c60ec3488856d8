"""Targets on vLLM: the Python that has it, the model that they run, and their settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.lm.models import SMALL, save_model
from tests.vllm.real import PYTHON

needs_vllm = [pytest.mark.vllm, pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs `make vllm`")]

ENGINE_ARGS = (
    '{"max_model_len": 2048, "enforce_eager": true, "skip_tokenizer_init": true, "dtype": "float32", "block_size": 32}'
)
ENVIRONMENT = {
    "OUTRIDER_ENGINE": "vllm",
    "OUTRIDER_ENGINE_ARGS": ENGINE_ARGS,
    "OUTRIDER_MAX_SESSION_LEN": "2048",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def save_tiny(folder: Path, vocabulary_size: int = 64, seed: int = 0, sharpness: float = 1.0) -> str:
    """Saves a tiny random model without a tokenizer; its heads are as wide as vLLM needs them on a CPU.

    Its logits are multiplied by `sharpness`.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    tokens = {"vocab_size": vocabulary_size, "eos_token_id": None, "pad_token_id": None}
    name = save_model(LlamaConfig(**{**SMALL, **sizes, **tokens}), folder, dtype=torch.float32, seed=seed)
    if sharpness != 1:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight.mul_(sharpness)
        model.save_pretrained(name)
    return name


@contextmanager
def patched(values: dict[str, float], **changes: float) -> Iterator[None]:
    """Changes values of a mapping for a while."""
    before = dict(values)
    values.update(changes)
    try:
        yield
    finally:
        values.clear()
        values.update(before)
