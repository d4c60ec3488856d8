"""A guard that keeps special tokens out of the contents of chat messages: a content is text, whatever it looks like.

A chat template puts contents between special tokens of its own, and renders one text. A message with `<|im_end|>` would
end itself there, and could continue as another role. So special tokens in contents are marked before the template is
rendered; the special tokens left in the rendered text are the template's.
"""

import re
import secrets
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Final

import tokenizers
from tokenizers import AddedToken

_PRIVATE: Final = 0xF0000
"""First of the 65,534 characters of plane 15, which have no meaning."""
_NUM_PRIVATE: Final = 0xFFFE
_NONCE_LEN: Final = 8


def encoded(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
    """Return the encoding of a text, without offsets; unlike `Tokenizer.encode` of the library, it releases the GIL."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


class ContentGuard:
    """Marks for special tokens in contents, and the encoding of text that a template renders of marked contents.

    The token ids of contents without special tokens are those of the tokenizer itself. Marks are private characters,
    drawn at random. A template that cuts a mark in two leaves such characters in the text, still as text.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # Longest first, as the tokenizer takes the longest of those that begin at one place.
        special = sorted((token for token in added.values() if token.special), key=lambda token: -len(token.content))
        self._special: Sequence[AddedToken] = [token for token in special if token.content]
        self._names = [token.content for token in self._special]
        self._longest = max(map(len, self._names), default=0)
        self._heads = frozenset(name[:end] for name in self._names for end in range(1, len(name)))
        self._tails = frozenset(name[start:] for name in self._names for start in range(1, len(name)))
        self._mark, self._stand_in = _nonce(), _nonce()
        self._chars = sorted(set(chain.from_iterable(self._names)))
        self._marks = {char: self._mark + chr(_PRIVATE + index) for index, char in enumerate(self._chars)}
        self._marked_char = re.compile(f"{self._mark}(.)", re.DOTALL)
        self._lock = threading.Lock()
        self._literal: tokenizers.Tokenizer | None = None
        self._ids: dict[int, int] = {}

    def marked(self, content: str) -> str:
        """Return a content without special tokens, also where a template's text is joined to its edges."""
        for name in self._names:
            while name in content:
                content = content.replace(name, self._marks[name[0]] + name[1:])
        return self._with_edges_marked(content)

    def encode(self, rendered: str) -> list[int]:
        """Return the token ids of the text that a template rendered of marked contents."""
        if self._mark not in rendered:
            return list(encoded(self._tokenizer, rendered, add_special_tokens=False).ids)
        literal = self._literal_tokenizer()
        for index, name in enumerate(self._names):
            rendered = rendered.replace(name, self._stand_in + chr(_PRIVATE + index))
        text = self._marked_char.sub(self._unmarked, rendered)
        return [self._ids.get(token_id, token_id) for token_id in encoded(literal, text, add_special_tokens=False).ids]

    def _with_edges_marked(self, content: str) -> str:
        # Templates may strip contents, so their edges are those without white space.
        body = content.strip()
        start = content.find(body)
        if self._completes(body):
            content = content[:start] + self._marks[body[0]] + content[start + 1 :]
            start, body = start + _NONCE_LEN + 1, body[1:]
        if any(body[-num:] in self._heads for num in range(1, min(self._longest, len(body)) + 1)):
            end = start + len(body)
            content = content[: end - 1] + self._marks[body[-1]] + content[end:]
        return content

    def _completes(self, body: str) -> bool:
        """Return whether a text may be the end, or the middle, of a special token."""
        if any(body[:num] in self._tails for num in range(1, min(self._longest, len(body)) + 1)):
            return True
        return 0 < len(body) < self._longest and any(body in name for name in self._names)

    def _unmarked(self, found: re.Match[str]) -> str:
        index = ord(found[1]) - _PRIVATE
        return self._chars[index] if 0 <= index < len(self._chars) else ""

    def _literal_tokenizer(self) -> tokenizers.Tokenizer:
        """Return a tokenizer that encodes special tokens as text, and a stand-in for each of them as that token.

        It is made at its first use, since it takes as much memory as the tokenizer itself.
        """
        with self._lock:
            if self._literal is None:
                literal = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
                stand_ins = [self._stand_in + chr(_PRIVATE + index) for index in range(len(self._special))]
                literal.add_tokens([_like(token, name) for token, name in zip(self._special, stand_ins, strict=True)])
                literal.encode_special_tokens = True
                known = zip(stand_ins, self._names, strict=True)
                self._ids = {_id(literal, stand_in): _id(self._tokenizer, name) for stand_in, name in known}
                self._literal = literal
        return self._literal


def _nonce() -> str:
    return "".join(chr(_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_NONCE_LEN))


def _like(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise RuntimeError(f"the tokenizer has no token {token!r}")
    return token_id
