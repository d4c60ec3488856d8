"""Small random heads for tests."""

import torch
from transformers import LlamaConfig

from outrider.lm.heads.eagle3 import Eagle3Config, Eagle3Head

WIDTH = 32


def make_head(norm_before_residual: bool = False) -> Eagle3Head:
    torch.manual_seed(0)
    layer = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    head = Eagle3Head(Eagle3Config(layer, WIDTH, 16, norm_before_residual)).double()
    for item in head.parameters():
        torch.nn.init.normal_(item, std=0.5)
    return head
