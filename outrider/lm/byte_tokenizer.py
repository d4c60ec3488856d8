"""A tokenizer of one token for each byte, with a chat template, for Markov models that have text."""

import json
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from outrider.lm.tokenizer import (
    CHAT_TEMPLATE_NAME,
    SPECIAL_TOKENS_NAME,
    TOKENIZER_NAME,
    TokenizerFiles,
    vocabulary_fingerprint,
)

_SPECIAL: Final = ("<|im_start|>", "<|im_end|>")
VOCABULARY_SIZE: Final = 258
EOS: Final = 257
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> TokenizerFiles:
    """Return the tokenizer's files: 256 tokens for bytes, then the beginning and the end of a message."""
    tokenizer = _tokenizer()
    files = {
        TOKENIZER_NAME: tokenizer.to_str().encode(),
        SPECIAL_TOKENS_NAME: json.dumps({"bos_token": None, "eos_token": _SPECIAL[1]}).encode(),
        CHAT_TEMPLATE_NAME: _TEMPLATE.encode(),
    }
    return TokenizerFiles(vocabulary_fingerprint(tokenizer.get_vocab()), files)


def printable_tokens() -> list[int]:
    """Return the ids of the line break and of the printable characters of ASCII."""
    ids = _tokenizer().get_vocab()
    # Byte-level tokenizers write these bytes as letters of their own.
    return sorted(ids[{" ": "\u0120", "\n": "\u010a"}.get(char, char)] for char in map(chr, (10, *range(32, 127))))


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token) for token in _SPECIAL])
    return tokenizer
