"""Constraints through real processes: outputs that validate, and the same text whatever is drafted or dies."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer

from outrider.client import (
    DraftOptions,
    Generation,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer
from outrider.lm.embedded import ensure_embedded
from outrider.lm.loading import load_model
from outrider.lm.markov import MarkovModel
from outrider.lm.tokenizer import TOKENIZER_NAME
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
from outrider.serving.channel import open_channel
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.schemas import random_schemas
from tests.served.fit import SIGNIFICANCE, p_value
from tests.served.stacks import until_all_in_rotation

TARGET = "markov:text=1,seed=5,scale=2"
NUM_SAMPLES = 400
PLAIN = Speculation(disabled=True)
ALWAYS = {"OUTRIDER_ADAPTIVE_SPECULATION": "false"}
PATIENT = {"OUTRIDER_DRAFT_MAX_WAIT_S": "5"}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CALL = StructuralTag('<call>{"name": "add", "arguments": ', json.dumps(PERSON), "}</call>", "<call>")
CONSTRAINTS = {
    "schema": Constraint(json_schema=json.dumps(PERSON)),
    "spaced": Constraint(json_schema=json.dumps(PERSON), any_whitespace=True),
    "regex": Constraint(regex="(ab|[x-z]{2,4}){3,9}-[0-9]{1,5}"),
    "choice": Constraint(choice=["yes, of course", "no", "yes"]),
    "grammar": Constraint(grammar='start: "(" (start | /[a-z]{1,4}/){1,3} ")"'),
    "call": Constraint(structural_tags=StructuralTags([CALL], at_least_one=True)),
}


def text_stack(**more: object) -> StackOptions:
    """Return a stack of models with text: a draft that agrees in part, and one within the target, which looks up."""
    drafts = (DraftOptions(drafter="model", model=f"{TARGET},noise=0.3"), DraftOptions(drafter="ngram"))
    return StackOptions(
        model=TARGET,
        drafts=drafts,
        target_threads=1,
        target_environment=ALWAYS,
        orchestrator_environment=PATIENT,
        **more,  # type: ignore[arg-type]
    )


async def output(client: OutriderClient, parameters: SamplingParameters, speculation: Speculation) -> Generation:
    return await client.complete("Say", parameters, speculation=speculation)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def texts() -> AsyncIterator[OutriderClient]:
    """A client of the stack of models with text."""
    options = text_stack()
    options = replace(options, drafts=(*options.drafts, DraftOptions(drafter="suffix")))
    async with LocalStack(options) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_no_drafter_and_no_tree_changes_a_constrained_text(texts: OutriderClient, temperature: float) -> None:
    speculations = (
        Speculation(drafter="model"),
        Speculation(drafter="model", lookahead=0, max_nodes=12),
        Speculation(drafter="model", lookahead=0, num_speculative_tokens=3),
        Speculation(drafter="ngram"),
        # It has the plain text of before.
        Speculation(drafter="suffix"),
    )
    num_accepted = 0
    for name, constraint in CONSTRAINTS.items():
        parameters = SamplingParameters(temperature=temperature, seed=7, max_tokens=90, constraint=constraint)
        plain = await output(texts, parameters, PLAIN)
        found = await asyncio.gather(*(output(texts, parameters, item) for item in speculations))
        assert {item.text for item in found} == {plain.text}, name
        num_accepted += sum(item.statistics.num_accepted_tokens for item in found)
        if plain.finish_reason is FinishReason.STOP and name in ("schema", "spaced"):
            jsonschema.validate(json.loads(plain.text), PERSON)
    assert num_accepted > 50


@pytest.mark.parametrize(
    "rule", [AcceptanceRule.COUPLED, pytest.param(AcceptanceRule.REJECTION, marks=pytest.mark.slow)]
)
async def test_an_object_goes_on_where_its_target_was_killed(rule: AcceptanceRule) -> None:
    """Kill -9 in the middle of the object: the other target begins its matcher anew from the committed tokens."""
    schema = {
        **PERSON,
        "properties": {**PERSON["properties"], "name": {"type": "string", "minLength": 40, "maxLength": 60}},
    }
    parameters = SamplingParameters(seed=11, max_tokens=200, constraint=Constraint(json_schema=json.dumps(schema)))
    options = replace(text_stack(num_targets=2), model=f"{TARGET},step_s=0.01")
    async with LocalStack(options) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        speculation = Speculation(acceptance_rule=rule)
        expected = await output(client, parameters, speculation)
        text, num_tokens = "", 0
        async for event in client.generate("Say", parameters, speculation=speculation):
            text += getattr(event, "text", "")
            num_tokens += len(getattr(event, "token_ids", ()))
            if num_tokens >= 12 and all(target.is_running for target in stack.targets):
                busy = [target for target in stack.targets if await is_busy(target.address)]
                busy[0].kill()
        jsonschema.validate(json.loads(text), schema)
        assert not all(target.is_running for target in stack.targets)
        if rule is AcceptanceRule.COUPLED:
            assert text == expected.text


async def is_busy(address: str) -> bool:
    """Return whether a target runs a request."""
    async with open_channel(address) as channel:
        load = await worker_pb2_grpc.WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest())
    return load.num_active_sessions > 0


WORDS = Constraint(regex="(a[bc]|b|ca?)-[xyz]")


def wanted_words(model: MarkovModel, last: int) -> dict[str, float]:
    """Return the probability of each output, by the model's own table within the constraint."""
    tokenizer = load_tokenizer(byte_tokenizer().files[TOKENIZER_NAME].decode(), VOCABULARY_SIZE, [EOS])
    begin = compiled(WORDS, tokenizer)
    found: dict[str, float] = {}
    todo: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for token_ids, weight in todo:
        matcher = begin.deep_copy()
        assert not token_ids or matcher.consume_tokens(list(token_ids))
        mask = matcher.compute_bitmask()
        allowed = [token_id for token_id in range(VOCABULARY_SIZE) if mask[token_id // 8] >> token_id % 8 & 1]
        row = model.transitions[token_ids[-1] if token_ids else last].tolist()
        total = sum(row[token_id] for token_id in allowed)
        for token_id in allowed:
            if token_id == EOS:
                found[tokenizer.decode_str(list(token_ids))] = weight * row[token_id] / total
            else:
                todo.append(((*token_ids, token_id), weight * row[token_id] / total))
    return found


@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.REJECTION])
async def test_outputs_follow_the_targets_distribution_within_the_constraint(
    texts: OutriderClient, rule: AcceptanceRule
) -> None:
    prompt = [40]
    expected = wanted_words(MarkovModel.from_name(TARGET), prompt[-1])
    assert math.isclose(sum(expected.values()), 1) and len(expected) == 15
    places = asyncio.Semaphore(24)

    async def one(seed: int) -> Generation:
        parameters = SamplingParameters(seed=seed, max_tokens=20, constraint=WORDS)
        request = GenerationRequest(
            token_ids=prompt,
            parameters=parameters,
            speculation=Speculation(acceptance_rule=rule, drafter="model", lookahead=0, num_speculative_tokens=3),
        )
        async with places:
            return await texts.complete(request, timeout_s=60)

    found = await asyncio.gather(*(one(seed) for seed in range(NUM_SAMPLES)))
    assert sum(item.statistics.num_accepted_tokens for item in found) > NUM_SAMPLES / 2
    assert p_value([item.text for item in found], expected) > SIGNIFICANCE


def is_prefix(text: str, begin: LLMatcher, tokenizer: LLTokenizer) -> bool:
    """Return whether more may follow a text, so that it becomes an output that the constraint allows."""
    token_ids = tokenizer.tokenize_bytes(text.encode())
    return begin.deep_copy().validate_tokens(token_ids) == len(token_ids)


FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])
STACKS = {
    "tiny": (text_stack(), load_model(TARGET).tokenizer),
    "embedded": (
        StackOptions(drafts=(DraftOptions(drafter="eagle3"), DraftOptions(drafter="block", at="target"))),
        None,
    ),
}


@pytest.mark.parametrize(
    ("model", "num"),
    [
        ("tiny", 12),
        pytest.param("tiny", 500, marks=pytest.mark.slow),
        pytest.param("embedded", 500, marks=[pytest.mark.slow, pytest.mark.embedded, pytest.mark.timeout(7200)]),
    ],
)
async def test_outputs_of_random_schemas_validate(model: str, num: int) -> None:
    """With drafts and without, greedy and sampled: the same text, valid where it ends, else the beginning of one."""
    options, files = STACKS[model]
    definition = (
        (ensure_embedded() / TOKENIZER_NAME).read_text() if files is None else files.files[TOKENIZER_NAME].decode()
    )
    size, eos = (49152, [2, 0]) if files is None else (VOCABULARY_SIZE, [EOS])
    tokenizer = load_tokenizer(definition, size, eos)
    ends: Counter[FinishReason | None] = Counter()
    places = asyncio.Semaphore(8)

    async def check(client: OutriderClient, schema: dict[str, Any], temperature: float) -> None:
        constraint = Constraint(json_schema=json.dumps(schema))
        parameters = SamplingParameters(temperature=temperature, seed=3, max_tokens=60, constraint=constraint)
        async with places:
            plain = await client.complete("Example: ", parameters, speculation=PLAIN, timeout_s=120)
            drafted = await client.complete("Example: ", parameters, timeout_s=120)
        assert drafted.text == plain.text, schema
        ends[plain.finish_reason] += 1
        if plain.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(plain.text), schema, format_checker=FORMATS)
        else:
            assert plain.finish_reason is FinishReason.LENGTH
            assert is_prefix(plain.text.rstrip("\ufffd"), compiled(constraint, tokenizer), tokenizer), schema

    async with LocalStack(options) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        schemas = random_schemas(num)
        if model == "tiny":
            # It writes ASCII only.
            schemas = [schema for schema in schemas if json.dumps(schema, ensure_ascii=False).isascii()]
        await asyncio.gather(*(check(client, schema, heat) for schema in schemas for heat in (0.0, 1.0)))
    assert ends.total() == 2 * len(schemas) and ends[FinishReason.STOP] > len(schemas)
    print(f"{model}: {len(schemas)} schemas, {dict(ends)}")
