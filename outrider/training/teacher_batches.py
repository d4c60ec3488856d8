"""Batches of conversations with the teacher's outputs at every position, computed once and stored on disk."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.training.corpus import Corpus
from outrider.training.schedule import groups
from outrider.training.teacher import Teacher


@dataclass(frozen=True)
class TeacherBatch:
    """A batch of conversations, right-padded to one length T, with the teacher's outputs.

    Attributes:
        token_ids: token ids, int64 [B, T].
        lens: number of tokens of each conversation: int64 [B].
        answer_start: see `Corpus`: int64 [B].
        greedy: see `Corpus`: bool [B].
        features: features of the feature layers, concatenated: [B, T, 3 * H].
        hidden: last hidden states, the input of the output layer: [B, T, H].
        log_totals: log-sum-exp of the logits: float32 [B, T].
    """

    token_ids: Tensor
    lens: Tensor
    answer_start: Tensor
    greedy: Tensor
    features: Tensor
    hidden: Tensor
    log_totals: Tensor

    @property
    def is_answer(self) -> Tensor:
        """Mask of the answers' tokens: bool [B, T]."""
        columns = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return (columns >= self.answer_start[:, None]) & (columns < self.lens[:, None])


class TeacherBatchStore:
    """A store of the teacher's outputs by conversation, each computed once.

    Args:
        teacher: teacher that computes the outputs.
        corpus: the conversations.
        folder: folder of the files, from which an interrupted run resumes; if None, nothing is stored, and every batch
            is computed when it is requested.
    """

    def __init__(self, teacher: Teacher, corpus: Corpus, folder: Path | None) -> None:
        self._teacher = teacher
        self._corpus = corpus
        self._width = 4 * teacher.hidden_size
        self._states: np.memmap[Any, np.dtype[np.uint16]] | None = None
        self._totals: np.memmap[Any, np.dtype[np.float32]] | None = None
        self._folder = folder

    def fill(self, tokens_per_batch: int) -> Iterator[int]:
        """Compute the missing outputs; yield the number of tokens done after each pass.

        Args:
            tokens_per_batch: tokens per pass, padding included.
        """
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        num = max(1, len(self._corpus.token_ids))
        self._states = _mapped(self._folder / "teacher.states", np.uint16, (num, self._width))
        self._totals = _mapped(self._folder / "teacher.totals", np.float32, (num,))
        lens = self._corpus.lens
        noted, done, num_tokens = self._num_done(), 0, 0
        for group in groups(np.argsort(lens, kind="stable"), lens, tokens_per_batch):
            done += len(group)
            num_tokens += int(lens[group].sum())
            if done > noted:
                self._compute(group)
                self._note_done(done)
            yield num_tokens

    def batch(self, indices: Sequence[int]) -> TeacherBatch:
        """Return the batch of these conversations."""
        corpus = self._corpus
        lens, token_ids = self._padded(indices)
        states = self._kept(indices, token_ids.shape[1]) or self._teacher.run(token_ids)
        device = self._teacher.device
        features, hidden, log_totals = (part.to(device) for part in states)
        return TeacherBatch(
            token_ids.to(device),
            torch.from_numpy(lens).to(device),
            torch.from_numpy(corpus.answer_start[list(indices)].astype(np.int64)).to(device),
            torch.from_numpy(corpus.greedy[list(indices)]).to(device),
            features,
            hidden,
            log_totals,
        )

    def _padded(self, indices: Sequence[int]) -> tuple[NDArray[np.int64], Tensor]:
        """Return the lengths of conversations, int64 [B], and their padded token ids, int64 [B, T]."""
        lens = self._corpus.lens[list(indices)]
        token_ids = torch.zeros(len(indices), int(lens.max()), dtype=torch.long)
        for row, index in enumerate(indices):
            token_ids[row, : lens[row]] = torch.from_numpy(self._corpus.tokens(index).astype(np.int64))
        return lens, token_ids

    def _compute(self, indices: Sequence[int]) -> None:
        assert self._states is not None and self._totals is not None
        lens, token_ids = self._padded(indices)
        features, hidden, totals = self._teacher.run(token_ids)
        states = torch.cat([features, hidden], dim=-1).to(torch.bfloat16).cpu().view(torch.uint16).numpy()
        for row, index in enumerate(indices):
            place = slice(self._corpus.offsets[index], self._corpus.offsets[index + 1])
            self._states[place] = states[row, : lens[row]]
            self._totals[place] = totals[row, : lens[row]].cpu().numpy()

    def _kept(self, indices: Sequence[int], length: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._states is None or self._totals is None:
            return None
        states = torch.zeros(len(indices), length, self._width, dtype=torch.bfloat16)
        totals = torch.zeros(len(indices), length)
        for row, index in enumerate(indices):
            place = slice(self._corpus.offsets[index], self._corpus.offsets[index + 1])
            part = torch.from_numpy(np.asarray(self._states[place])).view(torch.bfloat16)
            states[row, : len(part)] = part
            totals[row, : len(part)] = torch.from_numpy(np.asarray(self._totals[place]))
        width = self._teacher.hidden_size
        return states[..., : 3 * width], states[..., 3 * width :], totals

    @property
    def corpus(self) -> Corpus:
        """The conversations of the store."""
        return self._corpus

    @property
    def identity(self) -> dict[str, object]:
        """Fingerprints of the target and of the token ids."""
        digest = hashlib.sha256(self._corpus.token_ids.astype("<i4").tobytes()).hexdigest()
        return {"target": self._teacher.fingerprint, "tokens": digest}

    @property
    def _progress(self) -> Path:
        assert self._folder is not None
        return self._folder / "teacher.json"

    def _num_done(self) -> int:
        if not self._progress.exists():
            return 0
        noted = json.loads(self._progress.read_text())
        return int(noted["done"]) if noted["identity"] == self.identity else 0

    def _note_done(self, num: int) -> None:
        scratch = self._progress.with_suffix(".partial")
        scratch.write_text(json.dumps({"identity": self.identity, "done": num}))
        scratch.rename(self._progress)


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
    mode = "r+" if path.exists() and path.stat().st_size == wanted else "w+"
    if mode == "w+":
        path.with_name("teacher.json").unlink(missing_ok=True)
    opened: Any = np.memmap
    return opened(path, dtype, mode, shape=shape)
