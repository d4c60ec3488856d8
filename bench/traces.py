"""Traces of sessions in which much is said again: tool loops, code edits, and answers with quotations.

A script makes them from a seed, so that everybody has the same ones. Words are drawn at random, so they can be copied
but not be guessed: what a drafter has right of a trace is what it has seen before. Sessions of a kind go over the same
records, modules and documents, as those of one team do.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_SYLLABLES: Final = ("ka", "lo", "mi", "ten", "ra", "su", "vel", "or", "da", "ni", "per", "to", "gan", "el", "is", "mo")
_NUM_WORDS: Final = 300
_NUM_SUBJECTS: Final = 4
_NUM_STEPS: Final = 8
_THOUGHTS: Final = (
    "I need the {field} of {record} first.",
    "Next I look up the {field} of record {record}.",
    "The answer depends on {field}, so I read it from {record}.",
    "Let me compare that with the {field} of {record}.",
)


@dataclass(frozen=True, slots=True)
class Trace:
    """A session: its prompt, and the output that a target is made to give."""

    prompt: str
    output: str


class _Words:
    """Words of a vocabulary of its own, drawn at random."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self._known = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3))) for _ in range(_NUM_WORDS)]

    def words(self, num: int) -> str:
        return " ".join(self.draw.choices(self._known, k=num))

    def name(self) -> str:
        return self.words(2).replace(" ", "_")

    def sentence(self) -> str:
        return self.words(self.draw.randint(6, 14)).capitalize() + "."


def _tools(words: _Words) -> Callable[[], Trace]:
    """Return a source of tool loops: each step calls a tool with what was named before, and gets a record's value."""
    draw = words.draw
    records = {
        f"{draw.randrange(16**8):08x}": {words.name(): words.words(4) for _ in range(4)}
        for _ in range(3 * _NUM_SUBJECTS)
    }
    tools = ("read_record", "search_records", "check_record")

    def trace() -> Trace:
        chosen = draw.sample(list(records), _NUM_SUBJECTS)
        listed = "".join(f"{record}: {', '.join(records[record])}\n" for record in chosen)
        output = ""
        for _ in range(_NUM_STEPS):
            record = draw.choice(chosen)
            field = draw.choice(list(records[record]))
            call = {"tool": draw.choice(tools), "arguments": {"record": record, "field": field}}
            found = {"record": record, "field": field, "value": records[record][field], "status": "ok"}
            thought = draw.choice(_THOUGHTS).format(field=field, record=record)
            output += f"Thought: {thought}\nAction: {json.dumps(call)}\nObservation: {json.dumps(found)}\n"
        prompt = f"Call one tool at a time ({', '.join(tools)}).\nRecords and their fields:\n{listed}"
        return Trace(f"{prompt}Task: {words.sentence()}\n", output + f"Answer: {words.sentence()}\n")

    return trace


def _edits(words: _Words) -> Callable[[], Trace]:
    """Return a source of edits: a module is written again with a few of its lines changed."""
    draw = words.draw
    modules: list[list[str]] = []
    for _ in range(_NUM_SUBJECTS):
        lines: list[str] = []
        for _ in range(6):
            first, second, result = words.name(), words.name(), words.name()
            lines += [
                f"def {words.name()}({first}: int, {second}: int) -> int:",
                f'    """{words.sentence()}"""',
                f"    {result} = {first} * {draw.randrange(100)} + {second}",
                f"    if {result} > {draw.randrange(1000)}:",
                f"        return {second}",
                f"    return {result}",
            ]
        modules.append(lines)

    def trace() -> Trace:
        lines = draw.choice(modules)
        edited = list(lines)
        for place in draw.sample(range(len(lines)), 5):
            indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
            edited[place] = f"{indent}{words.name()} = {words.name()}({draw.randrange(100)})"
        prompt = f"Change this module ({words.words(5)}):\n" + "\n".join(lines)
        return Trace(f"{prompt}\nThe new module:\n", "\n".join(edited) + "\n")

    return trace


def _quotes(words: _Words) -> Callable[[], Trace]:
    """Return a source of answers that quote sentences of a document, with new words between them."""
    draw = words.draw
    documents = [[words.sentence() for _ in range(40)] for _ in range(_NUM_SUBJECTS)]

    def trace() -> Trace:
        sentences = draw.choice(documents)
        output = ""
        for number in range(1, 7):
            place = draw.randrange(len(sentences) - 1)
            output += f'{number}. {words.words(6).capitalize()}: "{" ".join(sentences[place : place + 2])}"\n'
        prompt = f"Quote what this document says of {words.words(3)}:\n" + " ".join(sentences)
        return Trace(f"{prompt}\n", output)

    return trace


KINDS: Final[dict[str, Callable[[_Words], Callable[[], Trace]]]] = {
    "tools": _tools,
    "edits": _edits,
    "quotes": _quotes,
}
"""Sources of traces by kind."""


def traces(kind: str, num: int, seed: int = 0) -> list[Trace]:
    """Return traces of one of KINDS, in the order in which their sessions come."""
    source = KINDS[kind](_Words(random.Random(f"{kind} {seed}")))
    return [source() for _ in range(num)]
