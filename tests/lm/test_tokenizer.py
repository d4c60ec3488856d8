"""The files of a tokenizer, as targets serve them to orchestrators."""

import json

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from outrider.lm.tokenizer import tokenizer_files

TEMPLATE = {"start_anchor": "A", "fields": {"content": {}}}


def test_the_response_template_travels_with_the_others() -> None:
    backend = Tokenizer(models.BPE({"a": 0}, []))
    plain = tokenizer_files(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert set(plain.files) == {"tokenizer.json", "special_tokens.json"}
    own = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template="{{ x }}", response_template=TEMPLATE)
    files = tokenizer_files(own).files
    assert files["chat_template.jinja"] == b"{{ x }}"
    assert json.loads(files["response_template.json"]) == TEMPLATE
