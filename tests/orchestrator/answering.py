"""A scripted target that answers conversations: its tokenizer has one token a byte, and markers as special tokens."""

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orchestrator.text.tokenizer import Tokenizer
from tests.orchestrator.scripted import ScriptedTarget

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|other|>")
SPECIAL = ("<|im_start|>", "<|im_end|>", *MARKERS)
EOS_TOKEN_ID = 257
BEGIN = "<|im_start|>assistant\n"
ROOM = 100_000


def model_files(template: str, response_template: Any = None, special: tuple[str, ...] = SPECIAL) -> dict[str, bytes]:
    """The files of a tokenizer of single bytes with these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    definition = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    definition.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    definition.decoder = decoders.ByteLevel()
    definition.add_special_tokens([tokenizers.AddedToken(token) for token in special])
    files = {
        "tokenizer.json": definition.to_str().encode(),
        "chat_template.jinja": template.encode(),
        "special_tokens.json": json.dumps({"bos_token": None, "eos_token": "<|im_end|>"}).encode(),
    }
    if response_template is not None:
        files["response_template.json"] = json.dumps(response_template).encode()
    return files


def tokenizer_of(files: dict[str, bytes]) -> Tokenizer:
    """The tokenizer of these files."""
    texts = {name: content.decode() for name, content in files.items()}
    special = json.loads(texts["special_tokens.json"])
    return Tokenizer(
        texts["tokenizer.json"], texts["chat_template.jinja"], special, texts.get("response_template.json")
    )


def give_answers(target: ScriptedTarget, files: dict[str, bytes], answer: Callable[[str], str]) -> None:
    """Makes a target answer conversations.

    Args:
        target: the target.
        files: of its tokenizer.
        answer: returns the answer to a prompt, both as text with special tokens; the end of text follows it.
    """
    tokenizer = tokenizer_of(files)
    begin = tokenizer.encode(BEGIN, ROOM)
    answers: dict[tuple[int, ...], list[int]] = {}

    def next_token(tokens: list[int]) -> int:
        end = next(at for at in range(len(tokens), 0, -1) if tokens[at - len(begin) : at] == begin)
        prompt = tuple(tokens[:end])
        if prompt not in answers:
            answers[prompt] = [*tokenizer.encode(answer(tokenizer.decode(prompt)), ROOM), EOS_TOKEN_ID]
        said = answers[prompt]
        return said[min(len(tokens) - end, len(said) - 1)]

    target.files = dict(files)
    target.next_token = next_token
    target.info.model = "/models/answers"
    target.info.tokenizer_fingerprint = "answers"
    target.info.vocabulary_size = tokenizer.backend.get_vocab_size()
    target.info.max_session_len = 16384
    target.info.eos_token_ids[:] = [EOS_TOKEN_ID]
    target.info.grammar_library = "llguidance"
