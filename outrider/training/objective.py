"""The training objective of drafts: the loss of a method against the target's distribution, at every depth."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.acceptance import Acceptance, coupled_matches, greedy_matches, walk
from outrider.training.methods import Method
from outrider.training.teacher_batches import TeacherBatch

DECAY: Final = 0.8
"""Weight of a depth relative to the previous one (Li et al. 2025, section 3.2)."""


@dataclass(frozen=True)
class Targets:
    """The target's distributions at the answer tokens of a batch, over the draft vocabulary.

    Attributes:
        rows: row of each answer token in the batch: int64 [N].
        columns: column of each answer token, at least 2: int64 [N].
        log_probs: the target's log-probabilities of the draft's tokens: float32 [N, draft_size].
        wanted: draft token id of the text's token; -1 if it is not in the draft vocabulary: int64 [N].
    """

    rows: Tensor
    columns: Tensor
    log_probs: Tensor
    wanted: Tensor


@torch.no_grad()
def targets_of(batch: TeacherBatch, method: Method, vocabulary: DraftVocabulary) -> Targets:
    """Return the target's distributions at all answer tokens that can be predicted."""
    is_target = batch.is_answer.clone()
    is_target[:, :2] = False  # the first prediction is of the third token
    rows, columns = is_target.nonzero(as_tuple=True)
    logits = functional.linear(batch.hidden[rows, columns - 1].to(method.head.weight.dtype), method.head.weight)
    log_probs = logits.float() - batch.log_totals[rows, columns - 1, None]
    return Targets(rows, columns, log_probs, vocabulary.indices(batch.token_ids[rows, columns]))


def predictions(
    method: Method, batch: TeacherBatch, targets: Targets, depth: int, part: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each depth, the draft's logits [n, draft_size], and the indices of their targets: int64 [n].

    Args:
        method: the draft.
        batch: texts of the target.
        targets: of the batch.
        depth: number of depths.
        part: which part of the columns to predict from, one of `method.num_parts` in turn; None for all of them.
    """
    stride = 1 if part is None else method.num_parts
    first = (part or 0) % stride
    for number, states in enumerate(method.states(batch, depth, slice(first, None, stride))):
        columns = targets.columns - number - 2
        places = ((columns >= 0) & (columns % stride == first)).nonzero().squeeze(1)
        chosen = states[targets.rows[places], columns[places] // stride]
        yield method.logits(chosen, batch.token_ids[targets.rows[places], targets.columns[places] - 1]), places


def loss_of(method: Method, batch: TeacherBatch, targets: Targets, depth: int, part: int = 0) -> Tensor:
    """Return the loss of the draft under the target: a mean over tokens, weighted over depths (`DECAY`).

    The probability of tokens outside the draft vocabulary is ignored.

    Args:
        method: the draft.
        batch: texts of the target.
        targets: of the batch.
        depth: number of depths in the loss.
        part: see `predictions`.
    """
    total = batch.hidden.new_zeros((), dtype=torch.float32)
    weights = 0.0
    for number, (logits, places) in enumerate(predictions(method, batch, targets, depth, part)):
        if len(places):
            is_greedy = batch.greedy[targets.rows[places]]
            wanted = _wanted(targets.log_probs[places], is_greedy, method.greedy_temperature)
            total = total + DECAY**number * method.loss(logits, wanted)
            weights += DECAY**number
    return total / max(weights, 1.0)


def _wanted(log_probs: Tensor, is_greedy: Tensor, greedy_temperature: float) -> Tensor:
    """Return the probabilities that the loss wants: the target's, of greedy answers at another temperature.

    What the draft's tokens have together stays the same.
    """
    probs = log_probs.exp()
    changed = (log_probs / greedy_temperature).softmax(-1) * probs.sum(-1, keepdim=True)
    return torch.where(is_greedy[:, None], changed, probs)


@torch.no_grad()
def measure(
    method: Method,
    batch: TeacherBatch,
    vocabulary: DraftVocabulary,
    generator: torch.Generator,
    widths: tuple[int, ...],
) -> dict[bool, Acceptance]:
    """Return the acceptance along the answers of a batch, for greedy answers (True) and sampled ones (False).

    Args:
        method: the draft.
        batch: texts of the target.
        vocabulary: vocabulary of the draft.
        generator: of the noise for sampled answers, on the device of the batch; see `coupled_matches`.
        widths: children per node at each depth; a chain has 1 everywhere.
    """
    targets = targets_of(batch, method, vocabulary)
    is_right = torch.zeros(len(widths), *batch.token_ids.shape, dtype=torch.bool, device=batch.token_ids.device)
    for number, (logits, places) in enumerate(predictions(method, batch, targets, len(widths))):
        rows, columns, wanted = targets.rows[places], targets.columns[places], targets.wanted[places]
        greedy = greedy_matches(logits, wanted, widths[number])
        sampled = coupled_matches(logits, targets.log_probs[places], wanted, generator, widths[number])
        is_right[number, rows, columns - number - 2] = torch.where(batch.greedy[rows], greedy, sampled)
    none = Acceptance(0, (0,) * len(widths), (0,) * len(widths))
    found = {True: none, False: none}
    for row in range(len(batch.lens)):
        start, end = max(1, int(batch.answer_start[row])), int(batch.lens[row])
        kind = bool(batch.greedy[row])
        found[kind] = found[kind] + walk(is_right[:, row].cpu(), start, end)
    return found
