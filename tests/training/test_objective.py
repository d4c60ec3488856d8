"""The loss: of parts of the columns, which together predict what all do, and what it wants at greedy answers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.corpus import from_conversations
from outrider.training.methods import make_method
from outrider.training.objective import loss_of, predictions, targets_of
from outrider.training.options import DistillOptions, MethodKind
from outrider.training.teacher import Teacher
from outrider.training.teacher_batches import TeacherBatchStore
from tests.training.models import save_target

DEPTH = 3


@torch.no_grad()
def test_parts_of_the_columns_predict_what_all_columns_do(tmp_path: Path) -> None:
    teacher = Teacher(save_target(tmp_path / "target"))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in (19, 24, 11)]
    batch = TeacherBatchStore(teacher, from_conversations([(text, 3, True) for text in texts]), None).batch([0, 1, 2])
    vocabulary = DraftVocabulary(torch.arange(64), 64)
    options = DistillOptions(teacher.name, tmp_path / "output", MethodKind.BLOCK, depth=DEPTH)
    method = make_method(teacher, vocabulary, options)
    targets = targets_of(batch, method, vocabulary)
    whole = list(predictions(method, batch, targets, DEPTH))
    parts = [list(predictions(method, batch, targets, DEPTH, part)) for part in range(method.num_parts)]
    assert method.num_parts > 1 and len(whole) == DEPTH
    for depth, (logits, places) in enumerate(whole):
        together = torch.cat([part[depth][1] for part in parts])
        assert sorted(together.tolist()) == places.tolist() and len(places) == sum(targets.columns >= depth + 2)
        expected = logits[torch.searchsorted(places, together)]
        assert torch.allclose(torch.cat([part[depth][0] for part in parts]), expected, atol=1e-4)


@torch.no_grad()
def test_greedy_answers_want_the_likeliest_tokens_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Teacher(save_target(tmp_path / "target"))
    text = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = TeacherBatchStore(teacher, from_conversations([(text, 3, True), (text, 3, False)]), None).batch([0, 1])
    vocabulary = DraftVocabulary(torch.arange(40), 64)
    options = DistillOptions(teacher.name, tmp_path / "output", MethodKind.BLOCK, depth=1)
    method = make_method(teacher, vocabulary, options)
    monkeypatch.setattr(method, "num_parts", 1)
    asked: list[Tensor] = []
    monkeypatch.setattr(method, "loss", lambda _, wanted: asked.append(wanted) or wanted.sum())
    targets = targets_of(batch, method, vocabulary)
    loss_of(method, batch, targets, 1)
    [wanted], probs, is_greedy = asked, targets.log_probs.exp(), targets.rows == 0
    assert torch.equal(wanted[~is_greedy], probs[~is_greedy])
    squared = probs[is_greedy] ** 2
    inside = probs[is_greedy].sum(-1, keepdim=True)
    assert torch.all(inside < 0.99) and torch.allclose(
        wanted[is_greedy], squared / squared.sum(-1, keepdim=True) * inside
    )
