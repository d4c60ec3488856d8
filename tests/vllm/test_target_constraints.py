"""Constraints of requests at a target on vLLM, followed by vLLM's own structured outputs."""

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from outrider import wire
from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument
from outrider.lm.embedded import ensure_embedded
from outrider.local.process import ServiceProcess
from outrider.parameters import AcceptanceRule, SamplingParameters
from tests.target_service.conversation import Caller
from tests.vllm.environment import needs_vllm
from tests.vllm.test_target import connected, output, served

pytestmark = [*needs_vllm, pytest.mark.embedded, pytest.mark.timeout(900)]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = StructuralTag('<call>{"arguments": ', json.dumps(SCHEMA), "}</call>", "<call>")


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_call(text: str) -> bool:
    return is_person(text.removeprefix(CALL.begin).removesuffix(CALL.end))


CASES: dict[str, tuple[Constraint, Callable[[str], object]]] = {
    "json_schema": (Constraint(json_schema=json.dumps(SCHEMA)), is_person),
    "regex": (
        Constraint(regex="(ab|[x-z]{2,4}){3,9}-[0-9]{1,5}"),
        re.compile("(ab|[x-z]{2,4}){3,9}-[0-9]{1,5}").fullmatch,
    ),
    "choice": (Constraint(choice=["yes, of course", "no", "yes"]), {"yes, of course", "no", "yes"}.__contains__),
    "grammar": (Constraint(grammar='root ::= "(" [a-z]+ ")"'), re.compile(r"\([a-z]+\)").fullmatch),
    "structural_tags": (
        Constraint(structural_tags=StructuralTags([CALL], at_least_one=True, stop_after_first=True)),
        is_call,
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(ensure_embedded()) / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceProcess]:
    arguments = {"max_model_len": 1024, "enforce_eager": True, "dtype": "float32", "block_size": 32}
    settings = {"OUTRIDER_ENGINE_ARGS": json.dumps(arguments), "OUTRIDER_MAX_SESSION_LEN": "1024"}
    async with served(str(ensure_embedded()), tmp_path_factory.mktemp("target"), **settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def caller(process: ServiceProcess) -> AsyncIterator[Caller]:
    async with connected(process) as found:
        yield found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", CASES)
async def test_the_output_follows_its_constraint(
    caller: Caller, tokenizer: Tokenizer, kind: str, temperature: float
) -> None:
    constraint, fits = CASES[kind]
    prompt = tokenizer.encode("Say it: ").ids
    stop = tokenizer.token_to_id("<|im_end|>")
    for seed in range(1, 4):
        parameters = SamplingParameters(temperature=temperature, seed=seed, max_tokens=120, constraint=constraint)
        await caller.open(seed, prompt, parameters, rule=AcceptanceRule.ENGINE, stop_token_ids=(stop, 0))
        await caller.span(seed, 0, prompt)
        token_ids = await output(caller, seed)
        if len(token_ids) < 120:
            assert fits(tokenizer.decode(token_ids))
        else:
            # Cut short: a beginning of one.
            assert kind in ("regex", "grammar")


async def test_a_constraint_behind_reasoning_is_refused(caller: Caller) -> None:
    parameters = SamplingParameters(constraint=Constraint(regex="a", reasoning_end="</think>"))
    frame = await caller.open(9, [1, 2], parameters, rule=AcceptanceRule.ENGINE, stop_token_ids=(0,))
    error = wire.refusal_from_message(frame.refusal)
    assert isinstance(error, InvalidArgument) and "reasoning_end" in error.message
