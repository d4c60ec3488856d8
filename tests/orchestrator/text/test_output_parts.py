"""The parts of an output: special tokens mark them, stop strings end them, and a replay goes on exactly."""

import random
from typing import Any

import pytest

from orchestrator.text.messages import Tool
from orchestrator.text.output import OutputText
from orchestrator.text.output_parts import OutputParts, Parsing
from orchestrator.text.parts import CallPiece, Content, Part, Reasoning, merged
from outrider.parameters import SamplingParameters
from tests.orchestrator.answering import ROOM, SPECIAL, model_files, tokenizer_of
from tests.orchestrator.text.templates import QWEN, WITH_TOOLS

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
BOTH = Parsing(reasoning=True, calls=True, tools=[ADD])
TOKENIZER = tokenizer_of(model_files(WITH_TOOLS, QWEN))
EOS = TOKENIZER.encode("<|im_end|>", ROOM)[0]
ANSWER = (
    "<think>\nTwo 🙂.\n</think>\n\nThe sum:\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
)


def output_of(parsing: Parsing = BOTH, *, prompt: str = "", **parameters: Any) -> OutputText:
    parts = OutputParts(TOKENIZER, parsing, TOKENIZER.encode(prompt, ROOM), (EOS,))
    return OutputText(TOKENIZER, SamplingParameters(**parameters), parts)


def parts_of(output: OutputText, token_ids: list[int], size: int = 1) -> list[Part]:
    parts: list[Part] = []
    for start in range(0, len(token_ids), size):
        absorbed = output.absorb(token_ids[start : start + size])
        parts += absorbed.parts
        if absorbed.stopped:
            return merged([*parts, *output.finish(stopped=True).parts])
    return merged([*parts, *output.finish(stopped=False).parts])


def test_special_tokens_mark_parts_and_are_in_no_text() -> None:
    tokens = TOKENIZER.encode(ANSWER, ROOM)
    expected = [
        Reasoning("Two 🙂."),
        Content("The sum:"),
        CallPiece(0, "add", '{"a": 2}'),
        CallPiece(1, "add", "{}"),
    ]
    assert parts_of(output_of(), tokens) == expected
    text = output_of().absorb(tokens).text
    assert not any(token in text for token in SPECIAL)


def test_the_id_of_a_call_is_in_no_part() -> None:
    text, markers = '[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 2}', ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    for special in (markers, ()):
        tokenizer = tokenizer_of(model_files("{{ tools }} [TOOL_CALLS] [CALL_ID] [ARGS]", None, (*SPECIAL, *special)))
        output = OutputText(tokenizer, SamplingParameters(), OutputParts(tokenizer, BOTH, (), ()))
        assert parts_of(output, tokenizer.encode(text, ROOM)) == [CallPiece(0, "add", '{"a": 2}')]


def test_other_special_tokens_and_the_end_mark_nothing() -> None:
    tokens = TOKENIZER.encode("a<|other|>b<think>c<|im_end|>", ROOM)
    assert parts_of(output_of(), tokens) == [Content("ab"), Reasoning("c")]


def test_however_many_tokens_come_at_once_the_parts_are_the_same() -> None:
    tokens = TOKENIZER.encode(ANSWER, ROOM)
    whole = parts_of(output_of(), tokens)
    rng = random.Random(5)
    for size in (2, 7, len(tokens)):
        assert parts_of(output_of(), tokens, size) == whole
    for _ in range(20):
        # A resumed stream: what came before is absorbed at once.
        offset = rng.randrange(len(tokens))
        one, resumed = output_of(), output_of()
        before = [part for token in tokens[:offset] for part in one.absorb([token]).parts]
        resumed.absorb(tokens[:offset])
        assert merged([*before, *parts_of(resumed, tokens[offset:], 3)]) == whole


def test_a_stop_string_ends_the_parts_where_it_ends_the_text() -> None:
    tokens = TOKENIZER.encode("<think>one two</think>three STOP four", ROOM)
    output = output_of(stop=("STOP",))
    assert parts_of(output, tokens) == [Reasoning("one two"), Content("three")]
    # Within a call, and across the token that would end it.
    tokens = TOKENIZER.encode('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ROOM)
    assert parts_of(output_of(stop=('"a"',)), tokens) == [CallPiece(0, "add", "{")]


def test_text_that_may_begin_a_stop_string_keeps_its_place_before_a_marker() -> None:
    tokens = TOKENIZER.encode("<think>ab</think>cd", ROOM)
    assert parts_of(output_of(stop=("bcx",)), tokens) == [Reasoning("ab"), Content("cd")]
    assert parts_of(output_of(stop=("bcd",)), tokens) == [Reasoning("a")]


def test_a_character_cut_by_a_marker_stays_where_it_was() -> None:
    half = TOKENIZER.encode("🙂", ROOM)[:2]
    marked = [*TOKENIZER.encode("<think>a", ROOM), *half, *TOKENIZER.encode("</think>b", ROOM)]
    first, second = parts_of(output_of(), marked)
    assert isinstance(first, Reasoning)
    assert first.text.startswith("a")
    assert isinstance(second, Content)
    assert second.text.endswith("b")


def test_reasoning_that_the_prompt_begins_goes_on() -> None:
    tokens = TOKENIZER.encode("Hm.</think>Yes.", ROOM)
    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert parts_of(output_of(prompt=prompt), tokens) == [Reasoning("Hm."), Content("Yes.")]
    # So does that of a family, which is told by the prompt's end.
    family = tokenizer_of(model_files(WITH_TOOLS + "{# <think> #}"))
    parts = OutputParts(family, BOTH, family.encode(prompt, ROOM), ())
    assert parts_of(OutputText(family, SamplingParameters(), parts), tokens) == [Reasoning("Hm."), Content("Yes.")]


@pytest.mark.parametrize("parsing", [Parsing(reasoning=True, calls=False), Parsing(reasoning=False, calls=True)])
def test_one_kind_may_be_asked_for(parsing: Parsing) -> None:
    parts = parts_of(output_of(parsing), TOKENIZER.encode(ANSWER, ROOM))
    assert any(isinstance(part, Reasoning) for part in parts) == parsing.reasoning
    assert any(isinstance(part, CallPiece) for part in parts) == parsing.calls
