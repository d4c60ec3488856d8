"""Parts as messages: ids that follow from the request, and nothing that a message cannot carry."""

from orchestrator.generation.parts import PartWriter
from orchestrator.text.parts import CallPiece, Content, Reasoning


def test_ids_follow_from_the_request_and_the_index() -> None:
    pieces = [CallPiece(0, "f", "{"), CallPiece(0, "", "}"), CallPiece(1, "f", "{}")]
    first, rest, second = (message.tool_call for message in PartWriter("a").messages(pieces))
    assert (rest.id, rest.name, rest.arguments) == ("", "", "}")
    assert len({first.id, second.id, PartWriter("b").messages(pieces)[0].tool_call.id}) == 3
    assert PartWriter("a").messages(pieces)[2].tool_call.id == second.id


def test_half_a_character_is_replaced() -> None:
    half = "\ud83d"
    content, reasoning, call = PartWriter("a").messages([Content(half), Reasoning(half), CallPiece(0, half, half)])
    assert (content.content, reasoning.reasoning) == ("?", "?")
    assert (call.tool_call.name, call.tool_call.arguments) == ("?", "?")
