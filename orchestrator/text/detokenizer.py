"""Tokens to text, piece by piece."""

import json
from typing import Final

import tokenizers

_MAX_WINDOW: Final = 256
"""Tokens that may wait for their text to become certain; far more than any character needs."""


class Detokenizer:
    """Turns output tokens into text; a pure function of the tokens pushed so far.

    A piece is given out once no later token can change it, so the concatenation of all pieces is the text of all
    tokens, special tokens left out, also where bytes are no valid UTF-8. (`tokenizers.decoders.DecodeStream` raises
    there, for tokenizers with byte fallback.) Only a run of 256 tokens without any certain text is cut short.

    Args:
        tokenizer: decodes.
        unsettled_tokens: what `unsettled_tokens_of` found.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, unsettled_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._unsettled_tokens = unsettled_tokens
        # Some decoders treat the first token otherwise, so the last tokens given out are decoded along.
        self._window: list[int] = []
        self._num_given = 0
        self._given = ""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token."""
        self._window.append(token_id)
        is_full = len(self._window) - self._num_given >= _MAX_WINDOW
        # Byte fallback decodes a run of bytes as a whole: one wrong byte behind a character undoes the character.
        if token_id in self._unsettled_tokens and not is_full:
            return ""
        text = self._text()
        if text.endswith("\ufffd") and not is_full:
            return ""
        return self._give(text) if len(text) > len(self._given) or is_full else ""

    def flush(self) -> str:
        """Returns what the end makes certain: an incomplete character becomes U+FFFD."""
        return self._give(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True)

    def _give(self, text: str) -> str:
        piece = text[len(self._given) :]
        del self._window[: self._num_given]
        self._num_given = len(self._window)
        self._given = self._text()
        return piece


def unsettled_tokens_of(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """Returns the ids of the tokens behind which text is never certain.

    They are, where the decoder joins such tokens to characters, those that stand for single bytes; and the special
    ones, because they are left out before the bytes around them are joined.
    """
    if "ByteFallback" not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return frozenset()
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    special = (token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return frozenset(token_id for token_id in (*found, *special) if token_id is not None)
