"""Tiny targets that a draft can learn from within seconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<s> {{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant{% endif %}"
)


def save_target(folder: Path) -> str:
    """Save a random model that depends mostly on the last token; return the folder's name."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1 if "layers" in name else 0.35)
    model.save_pretrained(folder)
    return str(folder)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Add a tokenizer of 64 words, with a chat template, to a target."""
    words = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{number}" for number in range(59))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return fast
