"""A tokenizer of single bytes, and the embedded model's, as llguidance reads them."""

import pytest
from llguidance import LLTokenizer

from outrider.grammar.compilation import load_tokenizer
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer
from outrider.lm.embedded import ensure_embedded
from outrider.lm.tokenizer import TOKENIZER_NAME

EMBEDDED_SIZE = 49152


@pytest.fixture(scope="session")
def byte_definition() -> str:
    return byte_tokenizer().files[TOKENIZER_NAME].decode()


@pytest.fixture(scope="session")
def by_bytes(byte_definition: str) -> LLTokenizer:
    return load_tokenizer(byte_definition, VOCABULARY_SIZE, [EOS])


@pytest.fixture(scope="session")
def embedded_definition() -> str:
    return (ensure_embedded() / "tokenizer.json").read_text()


@pytest.fixture(scope="session")
def embedded(embedded_definition: str) -> LLTokenizer:
    return load_tokenizer(embedded_definition, EMBEDDED_SIZE, [2, 0])
