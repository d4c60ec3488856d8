"""Texts of which the n-grams are indexed, so that what followed a text's end elsewhere is found.

For n-grams of a few sizes the index has their occurrences, latest first, as compressors of the LZ77 family have. It
finds about what a suffix tree finds. But its memory is bounded: the oldest tokens are forgotten one by one, and a text
can be removed.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

SIZES: Final = (16, 8, 4, 2)
"""Tokens of the n-grams that are indexed. One token alone leads almost anywhere."""
LONGEST: Final = 32
"""Tokens that are compared; a longer match counts as one of this length."""
MAX_OCCURRENCES: Final = 16
"""Occurrences of an n-gram that are looked at, the latest ones."""

ENTRY_BYTES: Final = 480
"""Memory of an indexed token: measured with tracemalloc on CPython 3.11, for a text that repeats nothing."""
_TOKEN_BYTES: Final = 4
_NONE: Final = -1


class Occurrence(NamedTuple):
    """A place where a text's end occurs in the corpus.

    Attributes:
        token_ids: the text there.
        position: of the token that follows it.
        length: tokens before the position that are equal, from the shortest of SIZES to LONGEST.
    """

    token_ids: "array[int]"
    position: int
    length: int


class SuffixCorpus:
    """Named texts, which grow at their ends, and the index of their latest tokens.

    Args:
        max_tokens: tokens that are indexed, of all texts together, in the order in which they came; at least 1.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._token_ids: dict[str, array[int]] = {}
        self._num_entered = self._num_tokens = 0
        # A ring of entries, one for each token: its text and position, and for each size the hash of the n-gram before
        # it, and the entry before that has the same.
        self._texts: list[array[int]] = []
        self._positions = array("I")
        self._hashes = tuple(array("q") for _ in SIZES)
        self._previous = tuple(array("q") for _ in SIZES)
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes, about."""
        return len(self._texts) * ENTRY_BYTES + self._num_tokens * _TOKEN_BYTES

    def more_bytes(self, num_tokens: int) -> int:
        """Return the memory that so many more tokens of a text would take, in bytes, about."""
        num_entries = min(num_tokens, self._max_tokens - len(self._texts))
        return num_entries * ENTRY_BYTES + num_tokens * _TOKEN_BYTES

    def release(self) -> None:
        """Drop all texts."""
        self._token_ids.clear()
        self._texts.clear()
        self._num_tokens = 0
        for latest in self._latest:
            latest.clear()

    def text(self, name: str) -> Sequence[int]:
        """Return the tokens of a text, none where there is no text of that name."""
        return self._token_ids.get(name, ())

    def extend(self, name: str, token_ids: Sequence[int]) -> None:
        """Add tokens at the end of a text, in O(tokens added)."""
        text = self._token_ids.setdefault(name, array("I"))
        for token_id in token_ids:
            self._enter(text)
            text.append(token_id)
        self._num_tokens += len(token_ids)

    def remove(self, name: str) -> None:
        """Drop a text, if there is one of that name; nothing of it is found any more."""
        if (text := self._token_ids.pop(name, None)) is not None:
            self._num_tokens -= len(text)
            # Its entries lead nowhere until they are the oldest.
            del text[:]

    def occurrences(self, name: str) -> list[Occurrence]:
        """Return places where the end of a text occurs, those of longer n-grams first, and the latest of each.

        Each is followed by a token at least. N-grams of the next size are looked at where those of longer ones occur
        less than MAX_OCCURRENCES times.
        """
        text = self._token_ids.get(name)
        if text is None:
            return []
        found: dict[tuple[int, int], Occurrence] = {}
        for place, size in enumerate(SIZES):
            if size <= len(text):
                for item in self._occurrences_of(text, place):
                    found.setdefault((id(item.token_ids), item.position), item)
            if len(found) >= MAX_OCCURRENCES:
                break
        return list(found.values())

    def _occurrences_of(self, text: "array[int]", place: int) -> Iterator[Occurrence]:
        """Yield the latest occurrences of the n-gram at a text's end."""
        size = SIZES[place]
        oldest = self._num_entered - len(self._texts)
        entry = self._latest[place].get(hash(tuple(text[-size:])), _NONE)
        for _ in range(MAX_OCCURRENCES):
            if entry < oldest:
                return
            slot = entry % self._max_tokens
            other, position = self._texts[slot], self._positions[slot]
            # Equal hashes may be of other n-grams, or of a text that was removed.
            if position < len(other) and (length := _common_end(other, position, text)) >= size:
                yield Occurrence(other, position, length)
            entry = self._previous[place][slot]

    def _enter(self, text: "array[int]") -> None:
        """Enter the n-grams at a text's end, where its next token follows."""
        slot, is_full = self._num_entered % self._max_tokens, len(self._texts) == self._max_tokens
        if is_full:
            self._leave(slot)
            self._texts[slot], self._positions[slot] = text, len(text)
        else:
            self._texts.append(text)
            self._positions.append(len(text))
        tail = tuple(text[-SIZES[0] :])
        columns = zip(SIZES, self._latest, self._hashes, self._previous, strict=True)
        for size, latest, hashes, previous in columns:
            key, before = 0, _NONE
            if size <= len(tail):
                key = hash(tail[-size:])
                before = latest.get(key, _NONE)
                latest[key] = self._num_entered
            if is_full:
                hashes[slot], previous[slot] = key, before
            else:
                hashes.append(key)
                previous.append(before)
        self._num_entered += 1

    def _leave(self, slot: int) -> None:
        """Take the oldest entry, which is in this slot, from the index."""
        oldest = self._num_entered - self._max_tokens
        for hashes, latest in zip(self._hashes, self._latest, strict=True):
            if latest.get(hashes[slot]) == oldest:
                del latest[hashes[slot]]


def _common_end(other: Sequence[int], position: int, text: Sequence[int]) -> int:
    """Return how many tokens before a position equal those at the end of a text, LONGEST at most."""
    end, length = len(text), 0
    most = min(position, end, LONGEST)
    while length < most and other[position - 1 - length] == text[end - 1 - length]:
        length += 1
    return length
