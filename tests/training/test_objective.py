"""The loss of parts of the columns: together they predict what all columns do, and each the same from its own."""

from pathlib import Path

import torch

from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.corpus import from_conversations
from outrider.training.methods import make_method
from outrider.training.objective import predictions, targets_of
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
