"""The map between a draft vocabulary and the target's."""

import pytest
import torch

from outrider.errors import InvalidArgument
from outrider.lm.heads.vocabulary import DraftVocabulary


def test_the_most_frequent_tokens_are_taken_and_some_always() -> None:
    counts = torch.tensor([0, 9, 3, 7, 0, 5])
    assert DraftVocabulary.most_frequent(counts, 3).token_ids.tolist() == [1, 3, 5]
    assert DraftVocabulary.most_frequent(counts, 3, always=[0]).token_ids.tolist() == [0, 1, 3]
    assert DraftVocabulary.most_frequent(counts, 100).token_ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_maps_of_a_checkpoint_lead_back() -> None:
    vocabulary = DraftVocabulary(torch.tensor([2, 3, 7]), 9)
    assert vocabulary.d2t.tolist() == [2, 2, 5]
    assert vocabulary.t2d.nonzero().squeeze(1).tolist() == [2, 3, 7]
    again = DraftVocabulary.from_maps(vocabulary.d2t, vocabulary.t2d)
    assert torch.equal(again.token_ids, vocabulary.token_ids) and again.target_size == 9


def test_maps_that_contradict_each_other_are_refused() -> None:
    vocabulary = DraftVocabulary(torch.tensor([2, 3, 7]), 9)
    with pytest.raises(InvalidArgument, match="contradict"):
        DraftVocabulary.from_maps(vocabulary.d2t + 1, vocabulary.t2d)


def test_indices_lead_to_the_drafts_logits() -> None:
    vocabulary = DraftVocabulary(torch.tensor([2, 3, 7]), 9)
    assert vocabulary.indices(torch.tensor([[7, 0], [3, 8]])).tolist() == [[2, -1], [1, -1]]


@pytest.mark.parametrize("token_ids", [[], [3, 2], [2, 2], [-1, 2], [2, 9]])
def test_wrong_token_ids_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        DraftVocabulary(torch.tensor(token_ids, dtype=torch.long), 9)
