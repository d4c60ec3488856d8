"""The teacher's outputs: computed once, and equal from disk."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.training.corpus import Corpus, from_conversations
from outrider.training.teacher import Teacher
from outrider.training.teacher_batches import TeacherBatchStore
from tests.training.models import save_target

BATCH = 64


class CountingTeacher(Teacher):
    """A teacher that counts its passes, and fails at a chosen one."""

    num_passes = 0
    fails_at = -1

    def run(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.num_passes == self.fails_at:
            raise KeyboardInterrupt
        self.num_passes += 1
        return super().run(token_ids)


@pytest.fixture
def teacher(tmp_path: Path) -> CountingTeacher:
    return CountingTeacher(save_target(tmp_path / "target"))


@pytest.fixture
def corpus() -> Corpus:
    generator = torch.Generator().manual_seed(0)
    lens = [5 + 3 * (number % 7) for number in range(20)]
    texts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lens]
    return from_conversations([(text, 2, number % 2 == 0) for number, text in enumerate(texts)])


def test_a_batch_is_what_the_model_computes(teacher: CountingTeacher, corpus: Corpus) -> None:
    batch = TeacherBatchStore(teacher, corpus, None).batch([3, 0, 5])
    assert batch.lens.tolist() == corpus.lens[[3, 0, 5]].tolist() and batch.greedy.tolist() == [False, True, False]
    for row, index in enumerate((3, 0, 5)):
        token_ids = torch.tensor(corpus.tokens(index)[None].astype("int64"))
        with torch.no_grad():
            output = teacher.model(token_ids, output_hidden_states=True)
        length = token_ids.shape[1]
        features = torch.cat([output.hidden_states[layer] for layer in teacher.feature_layers], -1)[0]
        assert torch.allclose(batch.features[row, :length], features, atol=1e-4)
        assert torch.allclose(batch.log_totals[row, :length], output.logits[0].logsumexp(-1), atol=1e-4)
        logits = batch.hidden[row, :length] @ teacher.output_layer.T
        assert torch.allclose(logits, output.logits[0], atol=1e-4)
        assert batch.is_answer[row].tolist() == [2 <= at < length for at in range(batch.token_ids.shape[1])]


def test_stored_batches_equal_computed_ones(teacher: CountingTeacher, corpus: Corpus, tmp_path: Path) -> None:
    kept, computed = TeacherBatchStore(teacher, corpus, tmp_path / "kept"), TeacherBatchStore(teacher, corpus, None)
    done = list(kept.fill(BATCH))
    assert done == sorted(done) and done[-1] == len(corpus.token_ids)
    teacher.fails_at = teacher.num_passes
    batch = kept.batch([7, 2])
    teacher.fails_at = -1
    wanted = computed.batch([7, 2])
    for row in range(2):
        length = int(wanted.lens[row])
        for name, tolerance in (("features", 0.01), ("hidden", 0.01), ("log_totals", 1e-4)):
            own, other = (getattr(each, name)[row, :length].float() for each in (batch, wanted))
            assert torch.allclose(own, other, rtol=tolerance, atol=tolerance), name


def test_an_interrupted_fill_goes_on(teacher: CountingTeacher, corpus: Corpus, tmp_path: Path) -> None:
    teacher.fails_at = teacher.num_passes + 2
    with pytest.raises(KeyboardInterrupt):
        list(TeacherBatchStore(teacher, corpus, tmp_path).fill(BATCH))
    before, teacher.fails_at = teacher.num_passes, -1
    list(TeacherBatchStore(teacher, corpus, tmp_path).fill(BATCH))
    repeated, total = teacher.num_passes - before, teacher.num_passes
    list(TeacherBatchStore(teacher, corpus, tmp_path).fill(BATCH))
    assert teacher.num_passes == total and before == 2 and repeated > 2


def test_batches_of_other_texts_are_computed_anew(teacher: CountingTeacher, corpus: Corpus, tmp_path: Path) -> None:
    list(TeacherBatchStore(teacher, corpus, tmp_path).fill(BATCH))
    before = teacher.num_passes
    other = from_conversations([(corpus.tokens(index)[::-1].tolist(), 2, True) for index in range(len(corpus))])
    list(TeacherBatchStore(teacher, other, tmp_path).fill(BATCH))
    assert teacher.num_passes > before
