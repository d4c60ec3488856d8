"""The output items of a response, as its parts make them: reasoning, messages and calls, and the events of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from outrider.v1 import generation_pb2

Kind: TypeAlias = Literal["content", "reasoning", "tool_call"]


class ItemEvent(NamedTuple):
    """An event of an item: its type and its fields."""

    kind: str
    fields: Mapping[str, Any]


@dataclass(slots=True)
class _Item:
    """An output item.

    Attributes:
        kind: of the parts that it consists of.
        id: its id.
        index: its place within the output.
        call: number of the call within the output; -1 for none.
        call_id: id of the call.
        name: of the tool that is called.
        text: the text, or the arguments, so far.
    """

    kind: Kind
    id: str
    index: int
    call: int = -1
    call_id: str = ""
    name: str = ""
    text: str = ""

    def content(self, status: str, *, is_new: bool = False) -> dict[str, Any]:
        """Return the item as a response has it; without its text where it `is_new`."""
        parts = [] if is_new else [self.part(self.text)]
        match self.kind:
            case "content":
                return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": parts}
            case "reasoning":
                return {"id": self.id, "type": "reasoning", "summary": [], "status": status, "content": parts}
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        return {"id": self.id, "type": "function_call", "status": status, **call}

    def part(self, text: str) -> dict[str, Any]:
        """Return the content part of a text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def delta(self, text: str) -> ItemEvent:
        """Return the event with new text."""
        place = {"item_id": self.id, "output_index": self.index}
        match self.kind:
            case "content":
                fields = {**place, "content_index": 0, "delta": text, "logprobs": []}
                return ItemEvent("response.output_text.delta", fields)
            case "reasoning":
                return ItemEvent("response.reasoning_text.delta", {**place, "content_index": 0, "delta": text})
        return ItemEvent("response.function_call_arguments.delta", {**place, "delta": text})

    def begin(self) -> list[ItemEvent]:
        """Return the events that come ahead of its text."""
        item = self.content("in_progress", is_new=True)
        events = [ItemEvent("response.output_item.added", {"output_index": self.index, "item": item})]
        if self.kind != "tool_call":
            place = {"item_id": self.id, "output_index": self.index, "content_index": 0}
            events.append(ItemEvent("response.content_part.added", {**place, "part": self.part("")}))
        return events

    def end(self, status: str) -> list[ItemEvent]:
        """Return the events that have all of its text."""
        place = {"item_id": self.id, "output_index": self.index}
        within = {**place, "content_index": 0}
        done = ItemEvent("response.content_part.done", {**within, "part": self.part(self.text)})
        match self.kind:
            case "content":
                text = ItemEvent("response.output_text.done", {**within, "text": self.text, "logprobs": []})
                events = [text, done]
            case "reasoning":
                events = [ItemEvent("response.reasoning_text.done", {**within, "text": self.text}), done]
            case _:
                known = {**place, "name": self.name, "arguments": self.text}
                events = [ItemEvent("response.function_call_arguments.done", known)]
        item = {"output_index": self.index, "item": self.content(status)}
        return [*events, ItemEvent("response.output_item.done", item)]


_PREFIXES: Mapping[Kind, str] = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}


class ResponseItems:
    """The items of one response.

    Args:
        name: of the response, from which the ids of its items follow.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: list[_Item] = []
        self._is_open = False

    def open_message(self) -> list[ItemEvent]:
        """Begin a message ahead of its text; return its events."""
        return self._open("content", -1)

    def push(self, parts: Iterable[generation_pb2.OutputPart]) -> list[ItemEvent]:
        """Return the events of more parts."""
        events: list[ItemEvent] = []
        for part in parts:
            kind, call, text = _read(part)
            if not self._is_open or (kind, call) != (self._items[-1].kind, self._items[-1].call):
                events += self.close("completed")
                events += self._open(kind, call, part.tool_call)
            item = self._items[-1]
            item.text += text
            events += [item.delta(text)] if text else []
        return events

    def close(self, status: str) -> list[ItemEvent]:
        """End the open item, if any; return its events."""
        if not self._is_open:
            return []
        self._is_open = False
        return self._items[-1].end(status)

    def empty_delta(self) -> ItemEvent | None:
        """Return an event without text of the open item; None where none is open."""
        return self._items[-1].delta("") if self._is_open else None

    def output(self, status: str) -> list[dict[str, Any]]:
        """Return the items; `status` is that of the last."""
        last = len(self._items) - 1
        return [item.content(status if item.index == last else "completed") for item in self._items]

    @property
    def is_empty(self) -> bool:
        """Whether there are no items."""
        return not self._items

    def _open(self, kind: Kind, call: int, piece: generation_pb2.ToolCallPart | None = None) -> list[ItemEvent]:
        number = sum(item.kind == kind for item in self._items)
        suffix = f"_{number}" if number else ""
        item = _Item(kind, f"{_PREFIXES[kind]}_{self._name}{suffix}", len(self._items), call)
        if piece is not None:
            item.call_id, item.name = piece.id, piece.name
        self._items.append(item)
        self._is_open = True
        return item.begin()


def _read(part: generation_pb2.OutputPart) -> tuple[Kind, int, str]:
    """Return the kind of a part, the number of its call, and its text."""
    match part.WhichOneof("kind"):
        case "tool_call":
            return "tool_call", part.tool_call.index, part.tool_call.arguments
        case "reasoning":
            return "reasoning", -1, part.reasoning
    return "content", -1, part.content
