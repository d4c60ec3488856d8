"""Grammars of outputs that are calls of tools, or else something of another form, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from outrider.constraint import StructuralTag

_COMPACT: Final = {"x-guidance": {"whitespace_flexible": False}}
"""Has llguidance write a schema's JSON without white space."""
_ANY_OBJECT: Final = '{"type": "object"}'


def calls_grammar(
    answer: str,
    tags: Sequence[StructuralTag],
    marker_tokens: Mapping[int, str],
    *,
    any_whitespace: bool,
    is_parallel: bool,
) -> str:
    """Return the grammar of an output that is calls, from its beginning on, or an answer.

    Args:
        answer: the rule `answer`, and what it needs.
        tags: the text of a call of each tool.
        marker_tokens: special tokens by their id, which are no text of a grammar.
        any_whitespace: whether JSON may have white space between its tokens.
        is_parallel: whether there may be several calls.
    """
    rules = [
        "start: answer | calls",
        answer,
        r'calls: call ("\n"? call)*' if is_parallel else "calls: call",
        f"call: {' | '.join(f'call_{number}' for number in range(len(tags)))}",
    ]
    for number, tag in enumerate(tags):
        begin, end = (_text_rule(text, marker_tokens) for text in (tag.begin, tag.end))
        rules.append(f"call_{number}: {begin} arguments_{number} {end}".rstrip())
        schema = json.loads(tag.json_schema or _ANY_OBJECT)
        rules.append(f"arguments_{number}: {json_rule(schema, any_whitespace=any_whitespace)}")
    return "\n".join(rules) + "\n"


def text_terminal(excluded: Sequence[str]) -> str:
    """Return the rule `answer` of any text that none of some expressions matches as a whole."""
    terms = [r"/(.|\n)*/", *("~/" + expression.replace("/", r"\/") + "/" for expression in excluded)]
    return f"answer: TEXT\nTEXT: {' & '.join(terms)}"


def json_rule(schema: Any, *, any_whitespace: bool) -> str:
    """Return the part of a rule that is JSON of a schema."""
    compact = {} if any_whitespace or not isinstance(schema, dict) else _COMPACT
    return f"%json {json.dumps({**schema, **compact} if isinstance(schema, dict) else schema)}"


def _text_rule(text: str, marker_tokens: Mapping[int, str]) -> str:
    """Return a text as a part of a rule, in which special tokens stand by their ids."""
    markers = {marker: token_id for token_id, marker in marker_tokens.items()}
    pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
    return " ".join(f"<[{markers[piece]}]>" if piece in markers else json.dumps(piece) for piece in pieces if piece)
