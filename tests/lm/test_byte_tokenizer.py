"""Markov models with text: printable, with a chat template, and an end that can be drawn."""

import torch

from orchestrator.text.tokenizer import Tokenizer
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, printable_tokens
from outrider.lm.loading import load_model


def test_a_markov_model_with_text_draws_printable_tokens_and_its_end() -> None:
    loaded = load_model("markov:text=1,seed=3")
    info = loaded.model.info
    assert (info.vocabulary_size, info.eos_token_ids) == (VOCABULARY_SIZE, (EOS,))
    assert loaded.tokenizer is not None
    assert info.tokenizer_fingerprint == loaded.tokenizer.fingerprint
    transitions = loaded.model.transitions
    drawn = torch.nonzero(transitions.sum(dim=0)).flatten().tolist()
    assert drawn == [*printable_tokens(), EOS]
    assert torch.allclose(transitions.sum(dim=1), torch.ones(VOCABULARY_SIZE, dtype=transitions.dtype))


def test_its_tokenizer_is_one_token_a_byte() -> None:
    files = load_model("markov:text=1").tokenizer.files
    template = files["chat_template.jinja"].decode()
    tokenizer = Tokenizer(files["tokenizer.json"].decode(), template, {"bos_token": None, "eos_token": "<|im_end|>"})
    assert len(tokenizer.encode("Hé\n", 10)) == 4
    assert tokenizer.decode(tokenizer.encode("Hé\n", 10)) == "Hé\n"
    printable = tokenizer.decode(printable_tokens())
    assert sorted(printable) == sorted([chr(10), *map(chr, range(32, 127))])
