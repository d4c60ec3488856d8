"""Output text: detokenised piece by piece, ended by stop strings, the same however often it is replayed."""

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orchestrator.text.byte_fallback import unsettled_tokens_of
from orchestrator.text.output import Detokenizer, OutputText, StopStrings
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """A tokenizer with one token a byte, so that every character beyond ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    definition = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    definition.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    definition.decoder = decoders.ByteLevel()
    definition.add_special_tokens([tokenizers.AddedToken(token) for token in SPECIAL])
    return Tokenizer(definition.to_str(), template, {"bos_token": None, "eos_token": SPECIAL[1]})


TOKENIZER = byte_tokenizer()
ROOM = 1000


def _random_text(rng: random.Random) -> str:
    alphabet = ["a", "b", " ", "\n", "é", "ß", "漢", "字", "🙂", "👩‍🚀", "\u200d", "\U0001d54f"]
    return "".join(rng.choices(alphabet, k=rng.randrange(1, 30)))


def test_pieces_make_the_whole_text_and_split_no_character() -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = _random_text(rng)
        detokenizer = Detokenizer(TOKENIZER.backend, TOKENIZER.unsettled_tokens)
        pieces = [detokenizer.push(token_id) for token_id in TOKENIZER.encode(text, ROOM)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + detokenizer.flush() == text


def test_an_end_within_a_character_is_shown_as_such() -> None:
    detokenizer = Detokenizer(TOKENIZER.backend, TOKENIZER.unsettled_tokens)
    pieces = [detokenizer.push(token_id) for token_id in TOKENIZER.encode("a🙂", ROOM)[:-1]]
    assert "".join(pieces) == "a"
    assert set(detokenizer.flush()) == {"\ufffd"}


@pytest.mark.parametrize("stop", [(), ("b漢",)])
def test_each_token_has_the_text_that_became_certain_with_it(stop: tuple[str, ...]) -> None:
    output, token_ids = OutputText(TOKENIZER, SamplingParameters(stop=stop)), TOKENIZER.encode("aéb漢c", ROOM)
    first, rest = output.absorb(token_ids[:2]), output.absorb(token_ids[2:])
    assert [absorbed.text for absorbed in (first, rest)] == ["".join(first.texts), "".join(rest.texts)]
    # A character belongs to its last byte; what may become a stop string waits for the token that decides.
    expected = ["a", "", "é", "", "", "", ""] if stop else ["a", "", "é", "b", "", "", "漢", "c"]
    assert [*first.texts, *rest.texts] == expected
    assert first.num_tokens + rest.num_tokens == len(expected)
    assert rest.stopped == bool(stop)


def test_special_tokens_are_left_out() -> None:
    output = OutputText(TOKENIZER, SamplingParameters())
    end = TOKENIZER.encode_chat([("user", "x")], continues=False, last_token=None, max_tokens=ROOM)[0]
    assert output.absorb([*TOKENIZER.encode("hi", ROOM), end]).text == "hi"


def _naive(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Ends the text at the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [text[:end].find(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def test_stop_strings_equal_the_naive_search() -> None:
    rng = random.Random(2)
    for _ in range(500):
        text = "".join(rng.choices("abc", k=rng.randrange(1, 25)))
        stops = tuple("".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4)))
        searcher, shown, stopped = StopStrings(stops), "", False
        for char in text:
            passed = searcher.push(char)
            shown, stopped = shown + passed.text, passed.stopped
            assert not any(stop in shown for stop in stops)
            if stopped:
                break
        assert (shown if stopped else shown + searcher.flush(), stopped) == _naive(text, stops), (text, stops)


def test_the_output_ends_with_the_token_that_completes_a_stop_string() -> None:
    tokens = TOKENIZER.encode("one two three", ROOM)
    output = OutputText(TOKENIZER, SamplingParameters(stop=("two",)))
    absorbed = output.absorb(tokens)
    assert (absorbed.num_tokens, absorbed.text, absorbed.stopped) == (7, "one ", True)
    assert output.finish(stopped=True).text == ""


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "one "), (7, "one two "), (9, "one two ")])
def test_stop_strings_wait_for_min_tokens(min_tokens: int, text: str) -> None:
    output = OutputText(TOKENIZER, SamplingParameters(stop=("two",), min_tokens=min_tokens))
    assert output.absorb(TOKENIZER.encode("one two two", ROOM)).text == text


def test_held_back_text_is_released_at_the_end() -> None:
    output = OutputText(TOKENIZER, SamplingParameters(stop=("end.",)))
    absorbed = output.absorb(TOKENIZER.encode("the en", ROOM))
    assert absorbed.text == "the "
    assert output.finish(stopped=False).text == "en"


def test_a_replay_continues_exactly_however_it_is_cut() -> None:
    rng = random.Random(3)
    for _ in range(100):
        tokens = TOKENIZER.encode(_random_text(rng) + "🙂 stop " + _random_text(rng), ROOM)
        cut = rng.randrange(len(tokens) + 1)
        whole, replay = (OutputText(TOKENIZER, SamplingParameters(stop=("op",))) for _ in range(2))
        expected = whole.absorb(tokens)
        head = replay.absorb(tokens[:cut])
        tail = "" if head.stopped else replay.absorb(tokens[cut:]).text
        assert head.text + tail == expected.text


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = OutputText(None, SamplingParameters())
    assert output.absorb([1, 2]).text == ""
    with pytest.raises(InvalidArgument) as caught:
        OutputText(None, SamplingParameters(stop=("x",)))
    assert caught.value.field == "stop"


def test_a_chat_continues_as_if_it_had_been_sent_whole() -> None:
    first = [("user", "Hi")]
    turn_1 = TOKENIZER.encode_chat(first, continues=False, last_token=None, max_tokens=ROOM)
    answer = TOKENIZER.encode("Hello!", ROOM)
    end = TOKENIZER.encode_chat(first, continues=False, last_token=None, max_tokens=ROOM)[len("Xuser\nHi")]
    whole = [*first, ("assistant", "Hello!"), ("user", "Bye")]
    expected = TOKENIZER.encode_chat(whole, continues=False, last_token=None, max_tokens=ROOM)
    for said in (answer, [*answer, end]):
        turn_2 = TOKENIZER.encode_chat([("user", "Bye")], continues=True, last_token=said[-1], max_tokens=ROOM)
        assert turn_1 + said + turn_2 == expected


@pytest.mark.parametrize(
    ("tokenizer", "messages", "field"),
    [
        (TOKENIZER, [("robot", "x")], "role"),
        (byte_tokenizer(None), [("user", "x")], "chat"),
        (byte_tokenizer("{{ raise_exception('no') }}"), [("user", "x")], "chat"),
        (byte_tokenizer("{{ messages[0].__class__.__mro__ }}"), [("user", "x")], "chat"),
    ],
)
def test_chats_that_cannot_be_rendered(tokenizer: Tokenizer, messages: list[tuple[str, str]], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tokenizer.encode_chat(messages, continues=False, last_token=None, max_tokens=ROOM)
    assert caught.value.field == field
    assert json.dumps(caught.value.metadata)


WORDS = ("▁", "a", "b", "é", "▁the", "🙂", "»", "\ufffd", "日")


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: words, and a token for each byte that no word covers."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's: every token is a run of bytes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def pieces_of(tokenizer: tokenizers.Tokenizer, token_ids: list[int]) -> list[str]:
    """The piece of each token, and the one of the end."""
    detokenizer = Detokenizer(tokenizer, unsettled_tokens_of(tokenizer))
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [byte_fallback(), byte_level()], ids=["byte_fallback", "byte_level"])
def test_pieces_of_any_tokens_make_the_whole_text(tokenizer: tokenizers.Tokenizer) -> None:
    rng = random.Random(5)
    size = tokenizer.get_vocab_size()
    for _ in range(2000):
        few = rng.sample(range(size), 6)
        token_ids = [rng.choice(few) if rng.random() < 0.5 else rng.randrange(size) for _ in range(rng.randrange(30))]
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(pieces_of(tokenizer, token_ids)) == whole


@pytest.mark.parametrize("tokenizer", [byte_fallback(), byte_level()], ids=["byte_fallback", "byte_level"])
def test_no_piece_holds_half_a_character(tokenizer: tokenizers.Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(300):
        text = "".join(rng.choice("ab é日🙂»") for _ in range(rng.randrange(1, 15)))
        if tokenizer.model.byte_fallback:  # a prefix space would be stripped
            token_ids = [1 + byte for byte in text.encode()]
        else:
            token_ids = tokenizer.encode(text).ids
        pieces = pieces_of(tokenizer, token_ids)
        assert "".join(pieces) == tokenizer.decode(token_ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_special_token_does_not_swallow_the_space_behind_it() -> None:
    tokenizer = byte_fallback()
    a, the, end = (tokenizer.token_to_id(name) for name in ("a", "▁the", "<|end|>"))
    assert pieces_of(tokenizer, [a, end, the])[:3] == ["a", "", " the"]


def test_text_that_never_becomes_certain_is_not_held_for_ever() -> None:
    tokenizer = byte_fallback()
    pieces = pieces_of(tokenizer, [1 + 0x80] * 600)
    assert max(map(len, pieces)) <= 257
    assert len("".join(pieces)) == 600


def test_a_replay_gives_the_same_pieces() -> None:
    tokenizer = byte_level()
    rng = random.Random(7)
    token_ids = [rng.randrange(257) for _ in range(400)]
    assert pieces_of(tokenizer, token_ids) == pieces_of(tokenizer, token_ids)
    assert pieces_of(tokenizer, token_ids[:150])[:150] == pieces_of(tokenizer, token_ids)[:150]
