"""A constraint as a grammar of llguidance, whose errors name the position."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from outrider.constraint import FIELD, Constraint, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument

_TEXT: Final = r"/(.|\n)*/"
_SPACE: Final = r"/[\n ]*/"
_INNER: Final = "constrained"
_DIALECT: Final = re.compile(r"https?://json-schema\.org/draft(-0[467]|/2019-09|/2020-12)/schema#?")
_NON_VERBOSE: Final = "<non-verbose/>"
_ANY_OBJECT: Final = '{"type": "object"}'
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)


def grammar_of(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    """Return the grammar of a constraint.

    Args:
        constraint: it.
        tokenizer: tells the tags, and the ends of reasoning, that are special tokens.

    Raises:
        InvalidArgument: a schema is no JSON, or nested too deeply. Other mistakes show once the grammar is compiled.
    """
    grammar = _inner(constraint, tokenizer)
    if not constraint.reasoning_end:
        return grammar
    outer = _after_reasoning(constraint.reasoning_end, tokenizer)
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": outer}, {**_as_part(grammar), "name": _INNER}]})


def one_line(message: str) -> str:
    """Return a message of the library as one line; the position is in its beginning."""
    return " ".join(message.replace(_NON_VERBOSE, "").split())


def _after_reasoning(end: str, tokenizer: LLTokenizer) -> str:
    """Return the rule of what is reasoned freely, up to its end, and then follows the constraint.

    A model may write special tokens while it reasons, the one that begins the reasoning above all.
    """
    special = _special_ids(end, tokenizer)
    if special:
        never = ",".join(map(str, (special[0], *tokenizer.eos_tokens)))
        return f"start: (<[^{never}]>)* <[{special[0]}]> {_SPACE} @{_INNER}\n"
    others = ",".join(map(str, _other_special_ids(tokenizer)))
    before = f"(REASONING_TEXT <[{others}]>)* " if others else ""
    rule = f"start: {before}{_until(end, tokenizer, 'REASONING')} {_SPACE} @{_INNER}\n"
    return rule + _definitions("REASONING", end, tokenizer)


@lru_cache(maxsize=4)
def _other_special_ids(tokenizer: LLTokenizer) -> tuple[int, ...]:
    """Return the special tokens that do not end an output."""
    token_ids = range(tokenizer.vocab_size)
    return tuple(item for item in token_ids if tokenizer.is_special_token(item) and item not in tokenizer.eos_tokens)


def _inner(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    match constraint.kind:
        case "json_schema":
            return _json(constraint.json_schema or "", constraint)
        case "json_object":
            return _json(_ANY_OBJECT, constraint)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.regex or "")
        case "choice":
            # As one lexeme: as alternatives of the grammar each would be parsed beside all others.
            return "start: CHOICE\nCHOICE: " + " | ".join(_quoted(text) for text in constraint.choice)
        case "grammar":
            return _lark(constraint.grammar or "")
    assert constraint.structural_tags is not None
    return _tagged(constraint.structural_tags, constraint, tokenizer)


def _lark(grammar: str) -> str:
    if grammar.lstrip().startswith("{"):
        raise InvalidArgument("grammar is JSON, must be in llguidance's dialect of Lark", FIELD)
    return grammar


def _json(schema: str, constraint: Constraint) -> str:
    parsed = _parsed(schema)
    if isinstance(parsed, bool):
        # The library takes no options beside these.
        schema = "{}" if parsed else '{"enum": []}'
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": constraint.any_whitespace})


def _parsed(schema: str) -> Any:
    try:
        parsed = json.loads(schema)
    except RecursionError:
        raise InvalidArgument("json_schema is nested too deeply", FIELD) from None
    except ValueError as error:
        raise InvalidArgument(f"json_schema is no JSON: {error}", FIELD) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidArgument("json_schema must be a JSON object", FIELD)
    dialect = parsed.get("$schema") if isinstance(parsed, dict) else None
    if dialect is not None and not (isinstance(dialect, str) and _DIALECT.fullmatch(dialect)):
        # Of another one the library would ignore what it does not know, and allow too much.
        raise InvalidArgument(f"json_schema is of {dialect!r}, must be of draft 4, 6, 7, 2019-09 or 2020-12", FIELD)
    return parsed


def _as_part(grammar: str) -> dict[str, Any]:
    """Return a grammar as an entry of a list of grammars."""
    if grammar.startswith('{"grammars"'):
        part: dict[str, Any] = json.loads(grammar)["grammars"][0]
        return part
    return {"lark_grammar": grammar}


def _check_triggers(tags: StructuralTags) -> None:
    """Raise `InvalidArgument` where a trigger begins another: what follows the shorter one could never be the other."""
    triggers = sorted({tag.trigger or tag.begin for tag in tags.tags})
    for one, other in pairwise(triggers):
        if other.startswith(one):
            raise InvalidArgument(f"the trigger {other!r} of a tag begins with another one, {one!r}", FIELD)


def _tagged(tags: StructuralTags, constraint: Constraint, tokenizer: LLTokenizer) -> str:
    if not tags.at_least_one:
        _check_triggers(tags)
    names = [f"tag_{number}" for number in range(len(tags.tags))]
    either = f"({' | '.join(names)})"
    if tags.at_least_one:
        # No text beside the tags: a call that must come comes first, and others may follow it.
        start = either if tags.stop_after_first else f"{either} ({_SPACE} {either})* {_SPACE}"
    else:
        # Text ends where a trigger begins, so what follows the last tag has none.
        start = f"{either}? TEXT" if tags.stop_after_first else f"{either}* TEXT"
        if tags.stop_after_first:
            start = f"{either} | TEXT"
    rules = [f"start: {start}", f"TEXT: {_TEXT}"]
    for name, tag in zip(names, tags.tags, strict=True):
        rules.append(_tag_rules(name, tag, tags, constraint, tokenizer))
    return "\n".join(rules) + "\n"


def _tag_rules(
    name: str, tag: StructuralTag, tags: StructuralTags, constraint: Constraint, tokenizer: LLTokenizer
) -> str:
    schema = _parsed(tag.json_schema or _ANY_OBJECT)
    options = {"whitespace_flexible": constraint.any_whitespace}
    schema = {"x-guidance": options, **schema} if isinstance(schema, dict) else schema
    body = f"%json {json.dumps(schema, ensure_ascii=False)} {_literal(tag.end, tokenizer)}"
    if tags.at_least_one:
        return f"{name}: {_literal(tag.begin, tokenizer)} {body}"
    trigger = tag.trigger or tag.begin
    rest = _literal(tag.begin[len(trigger) :], tokenizer)
    rule = f"{name}: {_until(trigger, tokenizer, name.upper())} {rest} {body}"
    return f"{rule}\n{_definitions(name.upper(), trigger, tokenizer)}"


def _until(text: str, tokenizer: LLTokenizer, name: str) -> str:
    """Return the part of a rule that is free text up to the first `text`, it included."""
    special = _special_ids(text, tokenizer)
    return f"{name}_TEXT <[{special[0]}]>" if special else f"{name.lower()}_until"


def _definitions(name: str, text: str, tokenizer: LLTokenizer) -> str:
    """Return the rules that `_until` refers to."""
    if _special_ids(text, tokenizer):
        return f"{name}_TEXT: {_TEXT}\n"
    return f"{name.lower()}_until[lazy]: {name}_TEXT {_quoted(text)}\n{name}_TEXT: {_TEXT}\n"


def _special_ids(text: str, tokenizer: LLTokenizer) -> Sequence[int]:
    """Return the id of the special token that a text is; empty where it is none."""
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return token_ids if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]) else ()


def _literal(text: str, tokenizer: LLTokenizer) -> str:
    """Return a text as a part of a rule: what it has of special tokens by their ids."""
    parts: list[str] = []
    plain: list[int] = []
    for token_id in tokenizer.tokenize_str(text, parse_special=True):
        if tokenizer.is_special_token(token_id):
            parts += [_quoted(tokenizer.decode_str(plain))] if plain else []
            parts.append(f"<[{token_id}]>")
            plain = []
        else:
            plain.append(token_id)
    if not parts:
        return _quoted(text) if text else ""
    return " ".join([*parts, _quoted(tokenizer.decode_str(plain))] if plain else parts)


def _quoted(text: str) -> str:
    return _ENCODER.encode(text)


def schema_of(text: str) -> Any:
    """Return the value of a schema's text, for those who make it a part of a grammar of their own.

    Raises:
        InvalidArgument: it is no JSON, nested too deeply, no schema, or of a dialect that is not known.
    """
    return _parsed(text)
