"""What a draft is told of a vLLM request: the tokens that end its text."""

import pytest

from outrider.vllm.terms import open_message
from tests.vllm.fakes import FakeRequest, sampling


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2]),
        ({"stop_token_ids": [7], "all_stop_token_ids": {2, 7}}, [2, 7]),
        ({"ignore_eos": True}, []),
        ({"ignore_eos": True, "stop_token_ids": [7], "all_stop_token_ids": {2, 7}}, [7]),
        ({"ignore_eos": True, "stop_token_ids": None}, []),
        ({"all_stop_token_ids": {2, 1000}}, [2]),
    ],
    ids=["end of text", "own too", "ignored", "own only", "none", "outside of the vocabulary"],
)
def test_the_tokens_that_end_the_text(changes: dict[str, object], expected: list[int]) -> None:
    request = FakeRequest("r", sampling_params=sampling(**changes))
    assert list(open_message(request, "name", 100, "").stop_token_ids) == expected
