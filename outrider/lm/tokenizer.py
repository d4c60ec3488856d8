"""Tokenizer files and vocabulary fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
SPECIAL_TOKENS_NAME = "special_tokens.json"
RESPONSE_TEMPLATE_NAME = "response_template.json"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as bytes by file name (see `WorkerService.GetTokenizer`), and the fingerprint of its vocabulary."""

    fingerprint: str
    files: Mapping[str, bytes]


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Return the SHA-256, in hexadecimal, of the token strings in order of id."""
    ordered = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def tokenizer_files(tokenizer: PreTrainedTokenizerFast) -> TokenizerFiles:
    """Return the files of a fast tokenizer, with the special tokens that chat templates use, and its templates."""
    files = {
        TOKENIZER_NAME: tokenizer.backend_tokenizer.to_str().encode(),
        SPECIAL_TOKENS_NAME: json.dumps({"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}).encode(),
    }
    if isinstance(tokenizer.chat_template, str):
        files[CHAT_TEMPLATE_NAME] = tokenizer.chat_template.encode()
    # Older versions of transformers, as beside vLLM, have none.
    if isinstance(template := getattr(tokenizer, "response_template", None), dict):
        files[RESPONSE_TEMPLATE_NAME] = json.dumps(template).encode()
    return TokenizerFiles(vocabulary_fingerprint(tokenizer.get_vocab()), files)
