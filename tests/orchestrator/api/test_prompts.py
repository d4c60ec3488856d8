"""Prompts that a chat template refuses: the error names the messages, whatever the template stumbles over."""

import pytest

from orchestrator.api.prompts import PromptTerms, encoded_prompt
from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2 as pb
from tests.orchestrator.answering import ROOM, model_files, tokenizer_of

TEMPLATE = (
    "{{ tools }}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls %}{% for name, value in call.function.arguments | items %}{{ name }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("tools", [[], [pb.Tool(name="add")]])
@pytest.mark.parametrize("variables", ["", '{"a": 1}'])
def test_a_template_that_takes_objects_only_refuses_the_messages(tools: list[pb.Tool], variables: str) -> None:
    tokenizer = tokenizer_of(model_files(TEMPLATE))
    terms = PromptTerms(tokenizer, tokenizer.backend.get_vocab_size(), ROOM)

    def chat(arguments: str) -> pb.GenerateRequest:
        call = pb.ToolCall(id="c", name="add", arguments=arguments)
        messages = [pb.ChatMessage(role="assistant", content="x", tool_calls=[call])]
        return pb.GenerateRequest(chat=pb.Chat(messages=messages, tools=tools, template_variables=variables))

    assert encoded_prompt(chat('{"a": 2}'), terms).token_ids
    with pytest.raises(InvalidArgument, match="arguments are not a JSON object") as refused:
        encoded_prompt(chat('{"a":'), terms)
    assert refused.value.field == "chat"
