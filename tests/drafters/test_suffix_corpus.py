import random

import pytest

from outrider.drafters.suffix_corpus import LONGEST, MAX_OCCURRENCES, SIZES, SuffixCorpus


def _matches(texts: dict[str, list[int]], name: str) -> dict[tuple[str, int], int]:
    """The definition, by looking everywhere: the length of the match before each position that a token follows."""
    end, found = texts[name], {}
    for other, text in texts.items():
        for position in range(len(text)):
            length = 0
            while length < min(position, len(end), LONGEST) and text[position - 1 - length] == end[-1 - length]:
                length += 1
            if length >= SIZES[-1]:
                found[other, position] = length
    return found


def _found(corpus: SuffixCorpus, texts: dict[str, list[int]], name: str) -> dict[tuple[str, int], int]:
    """What the corpus finds, by the name of the text."""
    names = {id(corpus.text(other)): other for other in texts}
    occurrences = corpus.occurrences(name)
    found = {(names[id(item.token_ids)], item.position): item.length for item in occurrences}
    assert len(found) == len(occurrences), "each is found once"
    return found


@pytest.mark.parametrize("num_token_ids", [2, 5, 40])
def test_what_it_finds_is_there_and_the_longest_is_found(num_token_ids: int) -> None:
    draw = random.Random(num_token_ids)
    texts: dict[str, list[int]] = {name: [] for name in "abc"}
    corpus = SuffixCorpus(10_000)
    for _ in range(300):
        name = draw.choice("abc")
        known = draw.choice(list(texts.values()))
        start = draw.randrange(len(known) + 1)
        more = known[start : start + draw.randrange(40)] + draw.choices(range(num_token_ids), k=draw.randrange(4))
        texts[name] += more
        corpus.extend(name, more)
        expected = _matches(texts, name)
        found = _found(corpus, texts, name)
        assert found.items() <= expected.items()
        if len(expected) <= MAX_OCCURRENCES:
            assert found == expected
        # Of a size of which there are few, all are found, and those of the longest are looked at first.
        for size in SIZES:
            long = {place: length for place, length in expected.items() if length >= size}
            if long and len(long) <= MAX_OCCURRENCES:
                assert long.items() <= found.items()


def test_the_latest_occurrences_are_found_first() -> None:
    corpus = SuffixCorpus(1000)
    corpus.extend("a", [7, 8, 1] * 30 + [7, 8])
    positions = [item.position for item in corpus.occurrences("a")]
    assert positions == list(range(89, 89 - 3 * MAX_OCCURRENCES, -3))


def test_a_text_that_was_removed_is_not_found_and_begins_again() -> None:
    corpus = SuffixCorpus(1000)
    corpus.extend("a", [1, 2, 3, 4])
    corpus.extend("b", [1, 2])
    assert [item.position for item in corpus.occurrences("b")] == [2]
    corpus.remove("a")
    assert not corpus.occurrences("b")
    corpus.remove("unknown")
    corpus.extend("a", [5, 1, 2, 6])
    assert [(item.position, item.length) for item in corpus.occurrences("b")] == [(3, 2)]


def test_the_oldest_tokens_are_forgotten() -> None:
    corpus = SuffixCorpus(8)
    corpus.extend("a", [1, 2, 3, 4])
    corpus.extend("b", [5, 6, 7, 8, 1, 2])
    assert [item.position for item in corpus.occurrences("b")] == [2], "its third token is the eighth from the end"
    corpus.extend("c", [1])
    assert not corpus.occurrences("b")
    corpus.extend("c", [7, 8])
    assert [item.position for item in corpus.occurrences("c")] == [4]


def test_what_a_removed_text_led_to_is_never_another_text() -> None:
    draw = random.Random(4)
    texts: dict[str, list[int]] = {name: [] for name in "abc"}
    corpus = SuffixCorpus(300)
    for _ in range(500):
        name = draw.choice("abc")
        if draw.random() < 0.2:
            texts[name] = []
            corpus.remove(name)
        more = draw.choices(range(3), k=draw.randrange(9))
        texts[name] += more
        corpus.extend(name, more)
        assert _found(corpus, texts, name).items() <= _matches(texts, name).items()


def test_memory_is_bounded_by_the_index_and_the_texts() -> None:
    draw = random.Random(1)
    corpus, largest = SuffixCorpus(500), 0
    for number in range(40):
        corpus.extend(str(number), [draw.randrange(10**6) for _ in range(100)])
        corpus.remove(str(number - 10))
        largest = max(largest, corpus.num_bytes)
        assert all(len(latest) <= 500 for latest in corpus._latest)
    assert largest <= 500 * 480 + 1100 * 4
    corpus.release()
    assert corpus.num_bytes == 0
