"""Tools for chat templates that know none: told in a system message, called and answered in plain text.

The form is that of Hermes and Qwen, which many models have seen.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from orchestrator.text.messages import Message, call_arguments
from orchestrator.text.tool_formats import HERMES_CALL

_INTRODUCTION: Final = """You may call functions to assist with the user's query. They are, one a line:
<tools>
{tools}
</tools>
For each function call, write a JSON object with the function's name and arguments within <tool_call></tool_call>:
{call}"""


def plain_messages(messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, has_system: bool) -> list[Message]:
    """Return messages without calls, results and tools: all of them are told as text.

    Args:
        messages: the messages.
        tools: as chat templates expect them; none for a request without.
        has_system: whether the template takes system messages; else the first message tells of the tools.
    """
    plain: list[Message] = []
    is_result = False
    for message in messages:
        if message.role == "tool":
            told = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        else:
            calls = [_call_text(call.name, call_arguments(call)) for call in message.tool_calls]
            content = "\n".join([*([message.content] if message.content else []), *calls])
            told = Message(message.role, content, message.reasoning, name=message.name)
        if is_result and told.role == "user":
            # Results and what follows are one message, since many templates want users and assistants to alternate.
            plain[-1] = plain[-1]._replace(content=f"{plain[-1].content}\n{told.content}")
        else:
            plain.append(told)
        is_result = message.role == "tool"
    return _with_tools(plain, tools, has_system=has_system) if tools else plain


def _with_tools(messages: list[Message], tools: Sequence[dict[str, Any]], *, has_system: bool) -> list[Message]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = HERMES_CALL.format(name="<function-name>", arguments="<args-json-object>")
    told = _INTRODUCTION.format(tools=lines, call=call)
    if messages and messages[0].role == "system":
        first = messages[0]
        return [first._replace(content=f"{first.content}\n\n{told}"), *messages[1:]]
    if has_system or not messages:
        return [Message("system", told), *messages]
    first = messages[0]
    return [first._replace(content=f"{told}\n\n{first.content}"), *messages[1:]]


def _call_text(name: str, arguments: dict[str, Any]) -> str:
    return HERMES_CALL.format(name=json.dumps(name), arguments=json.dumps(arguments, ensure_ascii=False))
