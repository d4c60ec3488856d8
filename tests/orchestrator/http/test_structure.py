"""What outputs must follow: each field as the constraint that reaches the target, and what contradicts itself."""

import json
from typing import Any

import httpx

from orchestrator.http.errors import as_http
from orchestrator.http.parsing import names_with
from orchestrator.http.structure import Structure
from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.errors import ConstraintFailed
from tests.orchestrator.http.test_tools import constraint_of
from tests.orchestrator.scripted import ScriptedTarget

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAGS = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<", "<f="]}
TAGGED = Constraint(structural_tags=StructuralTags([StructuralTag("<f=a>", json.dumps(SCHEMA), "</f>", "<f=")]))
NEWER = {
    "type": "triggered_tags",
    "triggers": ["<", "<f="],
    "tags": [
        {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    ],
}
FORCED = Constraint(
    structural_tags=StructuralTags([StructuralTag("<f=a>", json.dumps(SCHEMA), "</f>", "<f=")], True, True)
)
FIELDS: list[tuple[dict[str, Any], Constraint]] = [
    ({"response_format": FORMAT}, Constraint(json_schema=json.dumps(SCHEMA))),
    ({"response_format": {"type": "json_object"}}, Constraint(json_object=True)),
    ({"response_format": {"type": "structural_tag", **TAGS}}, TAGGED),
    ({"response_format": {"type": "structural_tag", "format": NEWER}}, TAGGED),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "format": {**NEWER, "at_least_one": True, "stop_after_first": True, "excludes": []},
            }
        },
        FORCED,
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": NEWER})}},
        TAGGED,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint(json_schema=json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Constraint(json_schema=json.dumps(SCHEMA))),
    ({"structured_outputs": {"json_object": True}}, Constraint(json_object=True)),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
        Constraint(json_object=True, any_whitespace=True),
    ),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, Constraint(json_object=True)),
    ({"structured_outputs": {"regex": "a+"}}, Constraint(regex="a+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Constraint(choice=["yes", "no"])),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, Constraint(grammar='start: "x"')),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, TAGGED),
    ({"guided_json": SCHEMA}, Constraint(json_schema=json.dumps(SCHEMA))),
    ({"guided_json": json.dumps(SCHEMA)}, Constraint(json_schema=json.dumps(SCHEMA))),
    ({"guided_json_object": True}, Constraint(json_object=True)),
    ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, Constraint(regex="a+")),
    # An empty schema is one that any JSON follows.
    ({"guided_json": {}}, Constraint(json_schema="{}")),
    ({"structured_outputs": {"json": {}}}, Constraint(json_schema="{}")),
    ({"guided_choice": ["yes"]}, Constraint(choice=["yes"])),
    ({"guided_grammar": 'start: "x"'}, Constraint(grammar='start: "x"')),
]


async def test_a_field_is_a_constraint(http: httpx.AsyncClient, target: ScriptedTarget) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for fields, constraint in FIELDS:
        for path, body in ((CHAT, chat), (COMPLETIONS, {"prompt": "x", "max_tokens": 2})):
            answer = await http.post(path, json={**body, **fields})
            assert answer.status_code == 200, answer.text
            assert constraint_of(target) == constraint


async def test_the_constraint_begins_behind_the_reasoning_of_a_chat(
    asker: httpx.AsyncClient, target: ScriptedTarget
) -> None:
    messages = [{"role": "user", "content": "2 + 2? Answer as JSON"}]
    answer = await asker.post(CHAT, json={"messages": messages, "response_format": FORMAT})
    assert answer.json()["choices"][0]["message"]["content"] == '{"sum": 4}'
    assert constraint_of(target) == Constraint(json_schema=json.dumps(SCHEMA), reasoning_end="</think>")
    prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    await asker.post(COMPLETIONS, json={"prompt": prompt, "response_format": FORMAT})
    assert constraint_of(target) == Constraint(json_schema=json.dumps(SCHEMA))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "structural_tag", "triggers": []}}, "response_format.structures"),
    ({"response_format": {**TAGS, "type": "structural_tag", "triggers": ["["]}}, "response_format.structures[0].begin"),
    ({"response_format": {**TAGS, "type": "structural_tag", "structures": []}}, "response_format.structures"),
    ({"response_format": {**TAGS, "type": "structural_tag", "triggers": []}}, "response_format.triggers"),
    ({"response_format": {**TAGS, "type": "structural_tag", "triggers": ["<"] * 257}}, "response_format.triggers"),
    (
        {"response_format": {"type": "structural_tag", "triggers": [""], "structures": [{"begin": "", "end": ""}]}},
        "response_format.structures[0].begin",
    ),
    ({"response_format": {"type": "structural_tag", "format": {"type": "sequence"}}}, "response_format.format.type"),
    ({"response_format": {**TAGS, "type": "structural_tag", "format": NEWER}}, "response_format.structures"),
    ({"response_format": {"type": "text", "format": NEWER}}, "response_format.format"),
    (
        {"response_format": {"type": "structural_tag", "format": {**NEWER, "triggers": ["["]}}},
        "response_format.format.tags[0].begin",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {**NEWER, "tags": []}}},
        "response_format.format.tags",
    ),
    (
        {"structured_outputs": {"structural_tag": '{"format": {"type": "tag"}}'}},
        "structured_outputs.structural_tag.format.type",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"structured_outputs": {"other": 1}}, "structured_outputs.other"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag.structures"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["x"] * 5000}, "guided_choice"),
    ({"guided_regex": "x" * 300_000}, "guided_regex"),
    ({"guided_regex": "x", "guided_json": SCHEMA}, "guided_regex"),
    ({"guided_regex": "x", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "x"}, "response_format": FORMAT}, "structured_outputs"),
    ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
]


async def test_what_makes_no_sense_is_refused_by_its_name(http: httpx.AsyncClient) -> None:
    for fields, parameter in WRONG:
        refused = await http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **fields})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == parameter
        assert ": :" not in refused.json()["error"]["message"]
        assert "constraint:" not in refused.json()["error"]["message"]


async def test_many_tags_are_refused_before_they_are_compared_with_triggers(http: httpx.AsyncClient) -> None:
    tags = [{"begin": f"{number:05d}{'x' * 200}", "end": ""} for number in range(4000)]
    form = {"type": "structural_tag", "structures": tags, "triggers": ["y"] * 4000}
    refused = await http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "response_format": form})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.structures")


async def test_text_is_free(http: httpx.AsyncClient, target: ScriptedTarget) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "text"}, "max_tokens": 2}
    assert (await http.post(CHAT, json=body)).status_code == 200
    assert constraint_of(target) is None


def test_a_constraint_that_fails_is_told_by_its_field() -> None:
    names = names_with({"prompt": "messages"}, Structure(Constraint(regex="a+"), "guided_regex"))
    told = as_http(ConstraintFailed("no token is allowed"), names)
    assert (told.status, told.parameter, told.code) == (400, "guided_regex", "constraint_failed")
