"""Tiny random models for tests, saved as folders that the loader reads."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral-window": MistralConfig(**SMALL, sliding_window=16),
    "gemma2-softcap-window": Gemma2Config(**SMALL, sliding_window=16, query_pre_attn_scalar=8),
}

RECURRENT = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)


def save_model(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> str:
    """Save a random model whose logits are spread widely, and return its folder's name."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.to(dtype).save_pretrained(folder)
    return str(folder)
