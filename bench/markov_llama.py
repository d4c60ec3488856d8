"""A Llama whose next token depends on the last one only, as a Markov model's: a target for vLLM with a known law.

Its embedding is one-hot, its attention and its feed-forward layer give zero, and its output layer is the table of the
Markov model: logits(x) = log p(. | x). So a `markov:` draft of our service proposes for it, and the distribution of its
text can be computed.
"""

import math
from pathlib import Path
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lm.markov import MarkovModel

_HEAD_DIM: Final = 32
_FLOOR: Final = -80.0
"""Logit of a token of probability 0."""


def save(name: str, folder: Path, max_len: int = 4096) -> MarkovModel:
    """Save the Llama of a Markov model of order 1; return the Markov model.

    Args:
        name: of the Markov model, `markov:...`.
        folder: is made.
        max_len: longest session, in tokens.
    """
    markov = MarkovModel.from_name(name)
    size = markov.options.vocabulary
    hidden = max(2 * _HEAD_DIM, -(-size // _HEAD_DIM) * _HEAD_DIM)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=_HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=hidden // _HEAD_DIM,
        num_key_value_heads=hidden // _HEAD_DIM,
        max_position_embeddings=max_len,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.post_attention_layernorm.weight.fill_(1.0)
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        # The norm makes of a one-hot vector sqrt(hidden) times itself.
        table = markov.transitions.log().clamp_min(_FLOOR) / math.sqrt(hidden)
        model.lm_head.weight[:, :size] = table.T.float()
    model.save_pretrained(folder)
    return markov
