"""The sampling parameters that a checkpoint recommends, as targets tell them."""

import json
import logging
from pathlib import Path

import pytest

from outrider.lm.generation_config import default_parameters


def written(folder: Path, content: object) -> str:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_the_fields_that_vllm_takes_are_taken(tmp_path: Path) -> None:
    content = {
        "do_sample": True,
        "eos_token_id": [1, 2],
        "max_new_tokens": 2048,
        "min_p": None,
        "repetition_penalty": 1.05,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    assert default_parameters(written(tmp_path, content)) == {
        "max_tokens": 2048,
        "repetition_penalty": 1.05,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


def test_without_the_file_nothing_is_recommended(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert default_parameters(str(tmp_path)) == {}


@pytest.mark.parametrize("content", ["{", "[]", {"temperature": -1}, {"top_k": "many"}, {"top_p": 7}])
def test_what_cannot_be_followed_is_left_out_and_logged(
    tmp_path: Path, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert default_parameters(written(tmp_path, content)) == {}
    assert content == "[]" or "recommends nothing" in caplog.text
