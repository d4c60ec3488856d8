"""Constraints of calls and the parser agree: what a constraint lets through is read as calls that follow their schemas.

Outputs are drawn from what each constraint allows, token by token, in every format of this project's own.
"""

import dataclasses
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from orchestrator.http.errors import HttpError
from orchestrator.http.structure import Structure, made
from orchestrator.http.tools import FunctionBody, Tools
from orchestrator.text.messages import checked_tool
from orchestrator.text.output import OutputText
from orchestrator.text.output_parts import OutputParts, Parsing
from orchestrator.text.parts import CallPiece, Content, merged
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.workers.model import Model
from outrider.constraint import Constraint
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.parameters import SamplingParameters
from outrider.v1 import tokens_pb2
from tests.orchestrator.answering import EOS_TOKEN_ID, ROOM, model_files, tokenizer_of
from tests.orchestrator.text.templates import CHANNELS

CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        **CLOSED,
        "properties": {"a": {"type": "integer", "maximum": 99}, "s": {"type": "string", "maxLength": 3}},
        "required": ["a"],
    },
    # Without a type: an object all the same.
    "find.it-1": {
        "additionalProperties": False,
        "properties": {"deep": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}}},
        "required": ["deep"],
    },
}
FUNCTIONS = [FunctionBody(name=name, parameters=schema, strict=True) for name, schema in SCHEMAS.items()]
SHAPE: dict[str, Any] = {**CLOSED, "properties": {"sum": {"enum": [1, 2]}}, "required": ["sum"]}
MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
FORMATS = {
    "hermes": "{{ tools }} <tool_call>",
    "llama": "{{ tools }} <|python_tag|>",
    "mistral_list": "{{ tools }} [TOOL_CALLS]",
    "mistral_arguments": "{{ tools }} [TOOL_CALLS] [ARGS]",
    "bare": "{{ tools }} <think></think>",
}
CLOSING = tokenizer_of(model_files("")).encode('"}]', ROOM)
MODES = ("required", "named", "auto", "single", "either", "allowed")


def model_of(source: str, *, special: bool) -> Model:
    tokenizer = tokenizer_of(model_files(source, None, ("<|im_start|>", "<|im_end|>", *(MARKERS if special else ()))))
    size = tokenizer.backend.get_vocab_size()
    return Model("m", "f", "t", tokenizer, size, ROOM, (EOS_TOKEN_ID,), tokens_pb2.SamplingParameters())


def tokenizer_in(model: Model) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


def constraint_of(mode: str, model: Model) -> Constraint:
    required, is_parallel = mode in ("required", "named"), mode not in ("single", "named")
    tools = Tools(
        FUNCTIONS,
        "required" if required else "auto",
        ["add"] if mode in ("named", "allowed") else None,
        is_parallel=is_parallel,
    )
    shape = made("response_format", json_schema=SHAPE) if mode == "either" else None
    structure = tools.constrained(shape, model)
    assert isinstance(structure, Structure)
    return structure.constraint


def matcher_of(constraint: Constraint, model: Model) -> LLMatcher:
    definition = tokenizer_in(model).backend.to_str()
    return compiled(constraint, load_tokenizer(definition, model.vocabulary_size, (EOS_TOKEN_ID,)))


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.nonzero(bits)[0]]


def drawn(matcher: LLMatcher, prefix: list[int], rng: random.Random) -> list[int] | None:
    """An output that begins with a prefix; None where none ends in time."""
    matcher = matcher.deep_copy()
    for token_id in prefix:
        assert matcher.consume_token(token_id)
    output = list(prefix)
    for _ in range(150):
        token_ids = allowed(matcher)
        if EOS_TOKEN_ID in token_ids and (len(token_ids) == 1 or rng.random() < 0.3):
            return output
        # Text ends early, and white space goes on.
        closing = [token_id for token_id in token_ids if token_id in CLOSING]
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else token_ids)
        if token_id == EOS_TOKEN_ID:
            return output
        assert matcher.consume_token(token_id)
        output.append(token_id)
    return None


def read(model: Model, token_ids: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of an output."""
    tokenizer = tokenizer_in(model)
    tools = [checked_tool(name, "", json.dumps(schema)) for name, schema in SCHEMAS.items()]
    parts = OutputParts(tokenizer, Parsing(True, True, tools), [], (EOS_TOKEN_ID,))
    output = OutputText(tokenizer, SamplingParameters(), parts)
    said = merged([*output.absorb(token_ids).parts, *output.finish(stopped=False).parts])
    calls: dict[int, list[str]] = {}
    for part in said:
        if isinstance(part, CallPiece):
            call = calls.setdefault(part.index, [part.name, ""])
            call[1] += part.arguments
    content = "".join(part.text for part in said if isinstance(part, Content))
    return content, [(name, arguments) for name, arguments in calls.values()]


def check(mode: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Raises where an output is not what a mode demands."""
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), {"type": "object", **SCHEMAS[name]})
    match mode:
        case "either" if not calls:
            jsonschema.validate(json.loads(content), SHAPE)
        case "either" | "required":
            assert calls
            assert not content
        case "named":
            assert [name for name, _ in calls] == ["add"]
            assert not content
        case "allowed":
            assert {name for name, _ in calls} == {"add"}
        case "single":
            assert len(calls) == 1
        case _:
            assert calls


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_constraint_lets_through_is_read_as_it_demands(name: str, mode: str, special: bool) -> None:
    model, rng = model_of(FORMATS[name], special=special), random.Random(f"{name} {mode}")
    tokenizer = tokenizer_in(model)
    form = tokenizer.output_format
    assert form.call is not None
    matcher, num = matcher_of(constraint_of(mode, model), model), 0
    for number in range(6):
        text = ""
        if mode in ("auto", "single", "allowed"):
            text = form.call.trigger if form.needs_tool or number % 2 else f"Hi. {form.call.trigger}"
        output = drawn(matcher, tokenizer.encode(text, ROOM), rng)
        if output is not None:
            num += 1
            check(mode, *read(model, output))
    assert num


@pytest.mark.parametrize("name", ["llama", "bare"])
def test_where_nothing_marks_calls_text_that_looks_like_one_is_one_or_none(name: str) -> None:
    model = model_of(FORMATS[name], special=False)
    matcher, tokenizer = matcher_of(constraint_of("auto", model), model), tokenizer_in(model)
    for text in ('Sure: {"name": "add", "arguments": {"z": 1}}', '{"a": [{"name": 1}]}', "[1]", "```sh\nls\n```"):
        assert matcher.deep_copy().validate_tokens(tokenizer.encode(text, ROOM)) == len(text)
        assert read(model, tokenizer.encode(text, ROOM)) == (text, [])
    for text in ('{"name":"add"', '[{"name"', '\n```json\n{"type"', '{"name": "none"', 'x<|python_tag|> {"name"'):
        assert matcher.deep_copy().validate_tokens(tokenizer.encode(text, ROOM)) < len(text)


def test_where_answers_have_a_beginning_of_their_own_only_grammars_can_tell_of_it() -> None:
    model = model_of(FORMATS["bare"], special=False)
    tokenizer = tokenizer_of(model_files("{{ messages }}", CHANNELS))
    marked = dataclasses.replace(model, tokenizer=tokenizer)
    for choice in ("none", "auto"):
        tools = Tools(FUNCTIONS, choice, None, is_parallel=True)
        with pytest.raises(HttpError) as refused:
            tools.constrained(made("response_format", json_object=True), marked)
        assert refused.value.parameter == "response_format"
    free = Tools([], "auto", None, is_parallel=True)
    grammar = made("guided_grammar", grammar='start: "x"')
    assert free.constrained(grammar, marked) == grammar
