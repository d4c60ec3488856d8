"""Input items of the Responses API as the messages of a conversation."""

from collections.abc import Sequence

from orchestrator.http.messages import CalledFunction, ChatMessage, ToolCallBody
from orchestrator.http.response_bodies import (
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    InputMessage,
    InputPart,
    ReasoningItem,
)


def input_messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the messages of input items; what an answer consists of, its reasoning, text and calls, is one message."""
    messages: list[ChatMessage] = []
    for item in items:
        message = _message(item)
        last = messages[-1] if messages else None
        if last is not None and _is_one_answer(last, message):
            messages[-1] = _joined(last, message)
        else:
            messages.append(message)
    return messages


def _message(item: InputItem) -> ChatMessage:
    match item:
        case FunctionOutputItem():
            return ChatMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id)
        case FunctionCallItem():
            function = CalledFunction(name=item.name, arguments=item.arguments)
            return ChatMessage(role="assistant", tool_calls=[ToolCallBody(id=item.call_id, function=function)])
        case ReasoningItem():
            text = "".join(part.text for part in item.content or () if part.type == "reasoning_text")
            return ChatMessage(role="assistant", reasoning_content=text)
        case InputMessage():
            return ChatMessage(role=item.role, content=_text(item.content))


def _is_one_answer(last: ChatMessage, message: ChatMessage) -> bool:
    """Return whether two messages are of one answer, in which reasoning comes first, then text, then calls."""
    if last.role != "assistant" or message.role != "assistant":
        return False
    if message.tool_calls:
        return True
    return last.content is None and not last.tool_calls


def _joined(last: ChatMessage, message: ChatMessage) -> ChatMessage:
    reasoning = (last.reasoning_content or "") + (message.reasoning_content or "")
    return ChatMessage(
        role="assistant",
        content=message.content if last.content is None else last.content,
        reasoning_content=reasoning or None,
        tool_calls=[*(last.tool_calls or ()), *(message.tool_calls or ())] or None,
    )


def _text(content: str | Sequence[InputPart]) -> str:
    """Return a content as text; parts are joined by a line break, as in chat completions."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
