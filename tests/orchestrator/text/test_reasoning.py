"""Whether an answer is expected to begin with reasoning."""

from typing import Any

import pytest

from orchestrator.text.reasoning import expected_reasoning_end
from tests.orchestrator.answering import model_files, tokenizer_of
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
        # A template that refuses so plain a conversation.
        ("{{ raise_exception('no') }}", QWEN, {}, "</think>"),
        ("{{ raise_exception('<think>') }}", None, {}, ""),
    ],
)
def test_the_end_of_the_reasoning_that_is_expected(
    template: str, response_template: Any, variables: dict[str, Any], end: str
) -> None:
    tokenizer = tokenizer_of(model_files(template, response_template))
    assert expected_reasoning_end(tokenizer, variables) == end
