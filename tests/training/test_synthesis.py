"""Conversations that a target writes by itself."""

import json
from pathlib import Path

import pytest

from outrider.errors import InvalidArgument
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import LanguageModel, SessionStep
from outrider.tokens import TokenSpan
from outrider.training.corpus import load_corpus
from outrider.training.synthesis import Synthesis, SynthesisOptions, read_prompts
from tests.training.models import save_target, save_tokenizer

OPTIONS = SynthesisOptions(num_conversations=20, max_turn_len=6, max_answer_len=12, num_sessions=7, shard_size=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(target: str) -> LanguageModel:
    return load_model(target, LoadOptions(kv_budget_bytes=1 << 22)).model


def _greedy(model: LanguageModel, prompt: list[int], num: int) -> list[int]:
    token_ids, cache = list(prompt), model.new_cache()
    while len(token_ids) < len(prompt) + num and token_ids[-1] != 2:
        span = TokenSpan(cache.cached_len, tuple(token_ids[cache.cached_len :]))
        token_ids.append(int(model.forward([SessionStep(cache, span)])[0][0].argmax()))
        cache.keep(())
    cache.release()
    return token_ids[len(prompt) :]


def test_greedy_answers_are_the_targets_and_half_are_greedy(model: LanguageModel, tmp_path: Path) -> None:
    assert list(Synthesis(model, None, tmp_path, OPTIONS).run()) == [8, 16, 20]
    corpus = load_corpus(tmp_path)
    assert len(corpus) == 20 and corpus.greedy.sum() == 10
    assert corpus.target_fingerprint == model.info.weights_fingerprint
    for index in range(20):
        token_ids, start = corpus.tokens(index).tolist(), int(corpus.answer_start[index])
        assert 1 <= len(token_ids) - start <= 12 and 2 not in token_ids[start:-1]
        if corpus.greedy[index]:
            assert token_ids[start:] == _greedy(model, token_ids[:start], 12)


def test_an_interrupted_run_goes_on_with_the_same_texts(model: LanguageModel, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for _ in Synthesis(model, None, whole, OPTIONS).run():
        pass
    next(Synthesis(model, None, parts, OPTIONS).run())
    first = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert list(Synthesis(model, None, parts, OPTIONS).run())[-1] == 20
    assert all((parts / name).stat().st_mtime_ns == when for name, when in first.items())
    assert load_corpus(whole).token_ids.tolist() == load_corpus(parts).token_ids.tolist()


def test_turns_are_asked_within_the_chat_template(model: LanguageModel, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    for _ in Synthesis(model, tokenizer, tmp_path / "data", OPTIONS).run():
        pass
    corpus = load_corpus(tmp_path / "data")
    for index in range(len(corpus)):
        prompt = corpus.tokens(index)[: corpus.answer_start[index]].tolist()
        assert prompt[:2] == [1, 3] and prompt[-3:] == [2, 1, 4], tokenizer.decode(prompt)


def test_prompts_of_ones_own_are_answered(model: LanguageModel, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    lines = [
        {"prompt": "w1 w2"},
        {"messages": [{"role": "user", "content": "w3"}]},
        {"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w9"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    prompts = read_prompts(path, tokenizer)
    assert prompts == [[6, 7], [1, 3, 8, 2, 1, 4], [1, 3, 8, 2, 1, 4]]
    assert list(Synthesis(model, tokenizer, tmp_path / "data", OPTIONS, prompts).run()) == [3]
    corpus = load_corpus(tmp_path / "data")
    assert [corpus.tokens(index)[: corpus.answer_start[index]].tolist() for index in range(3)] == prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "w1"}\nno', "line 2"),
        ('{"text": "w1"}', "line 1: neither prompt nor messages"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "line 1: messages must have one that is no answer"),
        ("[1]", "line 1"),
        ("\n", "has no prompts"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_prompts(path, save_tokenizer(tmp_path / "tokenizer"))
