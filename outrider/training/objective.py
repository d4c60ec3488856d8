"""What a draft is trained for: the target's distribution at every depth of its guesses."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.acceptance import Acceptance, coupled_matches, greedy_matches, walk
from outrider.training.methods import Method
from outrider.training.teacher import Lesson

DECAY: Final = 0.8
"""Weight of a depth over that of the one before (Li et al. 2025, section 3.2)."""


@dataclass(frozen=True)
class Targets:
    """The target's distributions over a lesson's answers, for the draft's vocabulary.

    Attributes:
        rows: conversation of each answer token: int64 [N].
        columns: its column, at least `depth` + 1 of the guesses made for it: int64 [N].
        log_probs: logarithm of what the target gave each of the draft's tokens: float32 [N, draft_size].
        wanted: index of the text's token in the draft's vocabulary; -1 where it has none: int64 [N].
    """

    rows: Tensor
    columns: Tensor
    log_probs: Tensor
    wanted: Tensor


@torch.no_grad()
def targets_of(lesson: Lesson, method: Method, vocabulary: DraftVocabulary) -> Targets:
    """Returns what the target would say at each token of the answers that a first guess can be made for."""
    is_target = lesson.is_answer.clone()
    is_target[:, :2] = False  # nothing is guessed before two tokens are known
    rows, columns = is_target.nonzero(as_tuple=True)
    logits = functional.linear(lesson.hidden[rows, columns - 1].to(method.head.weight.dtype), method.head.weight)
    log_probs = logits.float() - lesson.log_totals[rows, columns - 1, None]
    return Targets(rows, columns, log_probs, vocabulary.indices(lesson.token_ids[rows, columns]))


def guesses(method: Method, lesson: Lesson, targets: Targets, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields for each depth the draft's logits [n, draft_size], and which of the targets they are for: int64 [n]."""
    for number, states in enumerate(method.states(lesson, depth)):
        places = (targets.columns >= number + 2).nonzero().squeeze(1)
        chosen = states[targets.rows[places], targets.columns[places] - number - 2]
        yield functional.linear(chosen, method.head.weight), places


def loss_of(method: Method, lesson: Lesson, targets: Targets, depth: int) -> Tensor:
    """Returns the cross entropy of the draft under the target, a mean over tokens, weighed over depths.

    What the target gives tokens that the draft cannot say weighs nothing.

    Args:
        method: the draft.
        lesson: texts of the target.
        targets: of the lesson.
        depth: guesses one after another that are looked at.
    """
    total = lesson.hidden.new_zeros((), dtype=torch.float32)
    weights = 0.0
    for number, (logits, places) in enumerate(guesses(method, lesson, targets, depth)):
        if len(places):
            wanted = targets.log_probs[places].exp()
            total = total + DECAY**number * functional.cross_entropy(logits.float(), wanted)
            weights += DECAY**number
    return total / max(weights, 1.0)


@torch.no_grad()
def measure(
    method: Method, lesson: Lesson, vocabulary: DraftVocabulary, generator: torch.Generator, widths: tuple[int, ...]
) -> dict[bool, Acceptance]:
    """Returns what drafting along the lesson's answers comes to, for greedy ones (True) and for sampled ones (False).

    Args:
        method: the draft.
        lesson: texts of the target.
        vocabulary: the draft's.
        generator: for the noise that sampled answers may have been drawn with.
        widths: children of a node at each depth; 1 everywhere is a chain.
    """
    targets = targets_of(lesson, method, vocabulary)
    is_right = torch.zeros(len(widths), *lesson.token_ids.shape, dtype=torch.bool, device=lesson.token_ids.device)
    for number, (logits, places) in enumerate(guesses(method, lesson, targets, len(widths))):
        rows, columns, wanted = targets.rows[places], targets.columns[places], targets.wanted[places]
        greedy = greedy_matches(logits, wanted, widths[number])
        sampled = coupled_matches(logits, targets.log_probs[places], wanted, generator, widths[number])
        is_right[number, rows, columns - number - 2] = torch.where(lesson.greedy[rows], greedy, sampled)
    none = Acceptance(0, (0,) * len(widths), (0,) * len(widths))
    found = {True: none, False: none}
    for row in range(len(lesson.lens)):
        start, end = max(1, int(lesson.answer_start[row])), int(lesson.lens[row])
        kind = bool(lesson.greedy[row])
        found[kind] = found[kind] + walk(is_right[:, row].cpu(), start, end)
    return found
