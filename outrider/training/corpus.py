"""Corpora of conversations for training: token ids, and the start of each answer."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from outrider.errors import InvalidArgument

_ARRAYS: Final = ("token_ids", "offsets", "answer_start", "greedy")
_HELD_OUT_BINS: Final = 1000


@dataclass(frozen=True)
class Corpus:
    """A corpus of conversations, concatenated.

    Attributes:
        token_ids: token ids of all conversations, chat template included: int32 [N].
        offsets: start of each conversation, then N: int64 [n + 1].
        answer_start: index of the answer's first token within the conversation: int32 [n].
        greedy: whether the answer was generated greedily, else at temperature 1: bool [n].
        target_fingerprint: weights fingerprint of the model that answered; empty if unknown.

    Raises:
        InvalidArgument: the arrays contradict each other.
    """

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    answer_start: NDArray[np.int32]
    greedy: NDArray[np.bool_]
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        num = len(self.offsets) - 1
        if num < 0 or len(self.answer_start) != num or len(self.greedy) != num:
            raise InvalidArgument("offsets, answer_start and greedy have different lengths", "data")
        lens = np.diff(self.offsets)
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.token_ids) or bool((lens < 0).any()):
            raise InvalidArgument("offsets must ascend from 0 to the number of tokens", "data")
        if bool(((self.answer_start < 0) | (self.answer_start > lens)).any()):
            raise InvalidArgument("an answer_start lies outside its conversation", "data")

    def __len__(self) -> int:
        return len(self.answer_start)

    @property
    def lens(self) -> NDArray[np.int64]:
        """Number of tokens of each conversation: int64 [n]."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Return the token ids of one conversation: int32."""
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]]

    def select(self, indices: Sequence[int]) -> "Corpus":
        """Return these conversations, in this order."""
        return Corpus(
            np.concatenate([self.tokens(index) for index in indices] or [self.token_ids[:0]]),
            np.concatenate([[0], np.cumsum(self.lens[list(indices)])]).astype(np.int64),
            self.answer_start[list(indices)],
            self.greedy[list(indices)],
            self.target_fingerprint,
        )

    def cut(self, max_len: int) -> "Corpus":
        """Return the conversations cut to `max_len` tokens, without those whose answer is cut off completely."""
        kept = [index for index in range(len(self)) if self.answer_start[index] < min(max_len, self.lens[index])]
        parts = [self.tokens(index)[:max_len] for index in kept]
        return _joined(parts, self.answer_start[kept], self.greedy[kept], self.target_fingerprint)

    def split(self, held_out: float) -> tuple["Corpus", "Corpus"]:
        """Return the conversations for training, and the held-out ones.

        The choice is a function of the prompt, so that no prompt is in both parts.

        Args:
            held_out: share of the conversations, in (0, 1).
        """
        bins = [_bin(self.tokens(index)[: self.answer_start[index]]) for index in range(len(self))]
        is_held_out = [number < held_out * _HELD_OUT_BINS for number in bins]
        return (
            self.select([index for index, held in enumerate(is_held_out) if not held]),
            self.select([index for index, held in enumerate(is_held_out) if held]),
        )

    def counts(self, vocabulary_size: int) -> NDArray[np.int64]:
        """Return the number of occurrences of each token in answers: int64 [V]."""
        counts = np.zeros(vocabulary_size, np.int64)
        for index in range(len(self)):
            counts += np.bincount(self.tokens(index)[self.answer_start[index] :], minlength=vocabulary_size)
        return counts

    def save(self, path: Path) -> None:
        """Write the corpus to a .safetensors file, atomically."""
        scratch = path.with_suffix(".partial")
        save_file(
            {name: getattr(self, name) for name in _ARRAYS}, scratch, {"target_fingerprint": self.target_fingerprint}
        )
        scratch.rename(path)


def load_corpus(path: Path) -> Corpus:
    """Return a corpus from a .safetensors or .npz file, or from a folder of .safetensors shards.

    Raises:
        InvalidArgument: there is no file, or it is not a valid corpus.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgument(f"{path} has no .safetensors file", "data")
    return join([_load_file(file) for file in files])


def join(parts: Sequence[Corpus]) -> Corpus:
    """Return the conversations of all parts; raise `InvalidArgument` if they are of different targets."""
    fingerprints = {part.target_fingerprint for part in parts}
    if len(fingerprints) != 1:
        raise InvalidArgument("the shards were generated by different targets", "data")
    return Corpus(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([[0], *_shifted(parts)]).astype(np.int64),
        np.concatenate([part.answer_start for part in parts]),
        np.concatenate([part.greedy for part in parts]),
        fingerprints.pop(),
    )


def from_conversations(
    conversations: Sequence[tuple[Sequence[int], int, bool]], target_fingerprint: str = ""
) -> Corpus:
    """Return the corpus of conversations given as (token ids, answer start, whether greedy)."""
    return _joined(
        [np.array(token_ids, np.int32) for token_ids, _, _ in conversations],
        np.array([start for _, start, _ in conversations], np.int32),
        np.array([greedy for _, _, greedy in conversations], np.bool_),
        target_fingerprint,
    )


def _joined(
    parts: Sequence[NDArray[np.int32]],
    answer_start: NDArray[np.int32],
    greedy: NDArray[np.bool_],
    target_fingerprint: str,
) -> Corpus:
    offsets = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64)
    tokens = np.concatenate([*parts, np.zeros(0, np.int32)])
    return Corpus(tokens.astype(np.int32), offsets, answer_start, greedy, target_fingerprint)


def _shifted(parts: Sequence[Corpus]) -> Iterable[NDArray[np.int64]]:
    first = 0
    for part in parts:
        yield part.offsets[1:] + first
        first += len(part.token_ids)


def _bin(token_ids: NDArray[np.int32]) -> int:
    digest = hashlib.sha256(token_ids.astype("<i4").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") % _HELD_OUT_BINS


def _load_file(path: Path) -> Corpus:
    try:
        if path.suffix == ".npz":
            with np.load(path) as file:
                return _corpus({name: file[name] for name in _ARRAYS}, "")
        with safe_open(path, "np") as file:
            fingerprint = (file.metadata() or {}).get("target_fingerprint", "")
            return _corpus({name: file.get_tensor(name) for name in _ARRAYS}, fingerprint)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise InvalidArgument(f"{path} is not a valid corpus: {error}", "data") from error


def _corpus(arrays: dict[str, NDArray[np.generic]], fingerprint: str) -> Corpus:
    return Corpus(
        arrays["token_ids"].astype(np.int32),
        arrays["offsets"].astype(np.int64),
        arrays["answer_start"].astype(np.int32),
        arrays["greedy"].astype(np.bool_),
        fingerprint,
    )
