"""Whether an answer is expected to begin with reasoning."""

from typing import Any

import pytest

from orchestrator.text.reasoning import expected_reasoning_end
from tests.orchestrator.answering import ROOM, model_files, tokenizer_of
from tests.orchestrator.text.templates import CHANNELS, GEMMA, QWEN, WITH_TOOLS

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
BEGUN = PLAIN + "<think>\n{% endif %}"
SWITCHED = (
    PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MENTIONED = PLAIN + "{% endif %}{# </think> #}"
OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("template", "response_template", "variables", "end"),
    [
        # The template begins it.
        (BEGUN, None, {}, "</think>"),
        (BEGUN, QWEN, {}, "</think>"),
        # The template writes an empty one where it is disabled.
        (SWITCHED, None, {}, "</think>"),
        (SWITCHED, None, OFF, ""),
        (SWITCHED, QWEN, OFF, ""),
        # The checkpoint's own template has it; a family's template may only take it out of earlier answers.
        (WITH_TOOLS, QWEN, {}, "</think>"),
        (WITH_TOOLS, QWEN, {"thinks": True}, "</think>"),
        (MENTIONED, None, {}, ""),
        (PLAIN + "{% endif %}", None, {}, ""),
        (PLAIN + "{% endif %}", CHANNELS, {}, "<|end|>"),
        (PLAIN + "{% endif %}", GEMMA, {}, ""),
    ],
)
def test_the_end_of_the_reasoning_that_is_expected(
    template: str, response_template: Any, variables: dict[str, Any], end: str
) -> None:
    tokenizer = tokenizer_of(model_files(template, response_template))
    prompt = tokenizer.encode_chat(
        [("user", "?")], continues=False, last_token=None, max_tokens=ROOM, variables=variables
    )
    assert expected_reasoning_end(tokenizer, prompt) == end


# As SmolLM3 does: a word in the system message disables thinking.
BY_MESSAGE = (
    "{% if messages[0].role == 'system' and '/no_think' in messages[0].content %}{% set off = true %}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{% set off = true %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if off %}<think>\n\n</think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("response_template", [None, QWEN])
def test_it_is_the_request_s_own_prompt_that_counts(response_template: Any) -> None:
    tokenizer = tokenizer_of(model_files(BY_MESSAGE, response_template))
    for system, end in (("Be brief.", "</think>"), ("/no_think", "")):
        messages = [("system", system), ("user", "Is it </think>?")]
        prompt = tokenizer.encode_chat(messages, continues=False, last_token=None, max_tokens=ROOM)
        assert expected_reasoning_end(tokenizer, prompt) == end
