"""Corpora on disk, and the choice of held-out conversations."""

from pathlib import Path

import numpy as np
import pytest

from outrider.errors import InvalidArgument
from outrider.training.corpus import Corpus, from_conversations, join, load_corpus

CONVERSATIONS = [([1, 5, 6, 7], 2, True), ([1, 8, 9], 1, False), ([1, 5, 3, 3, 3], 2, True)]


def make(fingerprint: str = "a") -> Corpus:
    return from_conversations(CONVERSATIONS, fingerprint)


def test_conversations_come_back_from_a_file_and_from_shards(tmp_path: Path) -> None:
    make().save(tmp_path / "a.safetensors")
    make().save(tmp_path / "b.safetensors")
    one, both = load_corpus(tmp_path / "a.safetensors"), load_corpus(tmp_path)
    assert len(one) == 3 and len(both) == 6 and both.target_fingerprint == "a"
    assert [both.tokens(index).tolist() for index in (2, 3)] == [[1, 5, 3, 3, 3], [1, 5, 6, 7]]
    assert both.answer_start.tolist() == [2, 1, 2] * 2 and both.greedy.tolist() == [True, False, True] * 2


def test_an_npz_file_is_read(tmp_path: Path) -> None:
    corpus = make()
    arrays = {name: getattr(corpus, name) for name in ("token_ids", "offsets", "answer_start", "greedy")}
    np.savez(tmp_path / "a.npz", **{**arrays, "token_ids": corpus.token_ids.astype(np.uint16)})
    again = load_corpus(tmp_path / "a.npz")
    assert again.token_ids.dtype == np.int32 and again.tokens(1).tolist() == [1, 8, 9]


def test_one_prompt_is_never_on_both_sides() -> None:
    many = from_conversations([([1, index % 50, 9, index], 2, True) for index in range(500)])
    train, held_out = many.split(0.2)
    prompts = [{tuple(part.tokens(index)[:2]) for index in range(len(part))} for part in (train, held_out)]
    assert len(train) + len(held_out) == 500 and 20 < len(held_out) < 250
    assert not prompts[0] & prompts[1]
    more = from_conversations([([1, index % 70, 9, index], 2, True) for index in range(700)])
    assert prompts[1] <= {tuple(more.split(0.2)[1].tokens(index)[:2]) for index in range(len(more.split(0.2)[1]))}


def test_a_cut_drops_what_is_left_without_an_answer() -> None:
    cut = make().cut(3)
    assert [cut.tokens(index).tolist() for index in range(len(cut))] == [[1, 5, 6], [1, 8, 9], [1, 5, 3]]
    assert len(make().cut(2)) == 1


def test_counts_are_of_answers_only() -> None:
    assert make().counts(10).tolist() == [0, 0, 0, 3, 0, 0, 1, 1, 1, 1]


def test_shards_of_different_targets_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="different targets"):
        join([make("a"), make("b")])


@pytest.mark.parametrize(
    "wrong",
    [
        {"offsets": np.array([0, 4, 3, 12])},
        {"offsets": np.array([0, 4, 7])},
        {"answer_start": np.array([2, 4, 2])},
        {"greedy": np.array([True])},
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong: dict[str, np.ndarray]) -> None:
    corpus = make()
    names = ("token_ids", "offsets", "answer_start", "greedy")
    fields = {name: getattr(corpus, name) for name in names} | wrong
    with pytest.raises(InvalidArgument):
        Corpus(**fields)


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("no")
    with pytest.raises(InvalidArgument, match=r"a\.npz is not a valid corpus"):
        load_corpus(tmp_path / "a.npz")
    with pytest.raises(InvalidArgument, match=r"no \.safetensors file"):
        load_corpus(tmp_path)
