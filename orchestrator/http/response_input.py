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
    answer: list[ChatMessage] = []
    for message in map(_message, items):
        if answer and not _is_one_answer(answer[-1], message):
            messages.append(_joined(answer))
            answer = []
        answer.append(message)
    return [*messages, _joined(answer)] if answer else messages


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
    """Return whether two items are of one answer: all between other roles, but no two texts that follow each other."""
    has_two_texts = last.content is not None and message.content is not None
    return last.role == message.role == "assistant" and not has_two_texts


def _joined(answer: Sequence[ChatMessage]) -> ChatMessage:
    if len(answer) == 1:
        return answer[0]
    return ChatMessage(
        role="assistant",
        content="".join(item.text for item in answer),
        reasoning_content="".join(item.reasoning_content or "" for item in answer),
        tool_calls=[call for item in answer for call in item.tool_calls or ()],
    )


def _text(content: str | Sequence[InputPart]) -> str:
    """Return a content as text; parts are joined by a line break, as in chat completions."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
