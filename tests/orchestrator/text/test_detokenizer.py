"""Pieces of text, for both families of tokenizers, where bytes are no valid UTF-8 too."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orchestrator.text.detokenizer import Detokenizer, unsettled_tokens_of

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


def pieces(tokenizer: tokenizers.Tokenizer, token_ids: list[int]) -> list[str]:
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
        assert "".join(pieces(tokenizer, token_ids)) == whole


@pytest.mark.parametrize("tokenizer", [byte_fallback(), byte_level()], ids=["byte_fallback", "byte_level"])
def test_no_piece_holds_half_a_character(tokenizer: tokenizers.Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(300):
        text = "".join(rng.choice("ab é日🙂»") for _ in range(rng.randrange(1, 15)))
        if tokenizer.model.byte_fallback:  # a prefix space would be stripped
            token_ids = [1 + byte for byte in text.encode()]
        else:
            token_ids = tokenizer.encode(text).ids
        given = pieces(tokenizer, token_ids)
        assert "".join(given) == tokenizer.decode(token_ids)
        assert not any("\ufffd" in piece for piece in given)


def test_a_special_token_does_not_swallow_the_space_behind_it() -> None:
    tokenizer = byte_fallback()
    a, the, end = (tokenizer.token_to_id(name) for name in ("a", "▁the", "<|end|>"))
    assert pieces(tokenizer, [a, end, the])[:3] == ["a", "", " the"]


def test_text_that_never_becomes_certain_is_not_held_for_ever() -> None:
    tokenizer = byte_fallback()
    given = pieces(tokenizer, [1 + 0x80] * 600)
    assert max(map(len, given)) <= 257
    assert len("".join(given)) == 600


def test_a_replay_gives_the_same_pieces() -> None:
    tokenizer = byte_level()
    rng = random.Random(7)
    token_ids = [rng.randrange(257) for _ in range(400)]
    assert pieces(tokenizer, token_ids) == pieces(tokenizer, token_ids)
    assert pieces(tokenizer, token_ids[:150])[:150] == pieces(tokenizer, token_ids)[:150]
