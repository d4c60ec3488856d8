"""Bodies that are wrong a thousand times over: the first error is enough, since pydantic collects gigabytes of them."""

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.http.bodies import ChatBody
from orchestrator.http.body import Body
from orchestrator.http.ollama_bodies import OllamaChatBody
from orchestrator.http.response_bodies import ResponsesBody

MANY: list[Any] = [1] * 1000
MESSAGES: list[Any] = [{"role": "user", "content": "x"}]
TAGS: dict[str, Any] = {"type": "structural_tag"}
WRONG: list[tuple[type[Body], dict[str, Any]]] = [
    (ResponsesBody, {"input": MANY}),
    (ResponsesBody, {"input": [{"role": "user", "content": MANY}]}),
    (ResponsesBody, {"input": [{"type": "function_call_output", "call_id": "c", "output": MANY}]}),
    (ResponsesBody, {"input": [{"type": "reasoning", "content": MANY}]}),
    (ResponsesBody, {"input": "x", "metadata": {str(number): 1 for number in range(200)}}),
    (ResponsesBody, {"input": "x", "metadata": {str(number): "" for number in range(17)}}),
    (OllamaChatBody, {"messages": MANY}),
    (OllamaChatBody, {"tools": MANY}),
    (OllamaChatBody, {"options": {"stop": MANY}}),
    (OllamaChatBody, {"messages": [{"role": "assistant", "tool_calls": MANY}]}),
    (ChatBody, {"messages": MESSAGES, "response_format": {**TAGS, "structures": MANY}}),
    (ChatBody, {"messages": MESSAGES, "response_format": {**TAGS, "triggers": MANY}}),
]


@pytest.mark.parametrize(("kind", "values"), WRONG)
def test_a_list_that_is_wrong_ends_with_its_first_error(kind: type[Body], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(values)
    # One more for the other branch of each union.
    assert caught.value.error_count() <= 3
