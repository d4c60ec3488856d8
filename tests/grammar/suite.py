"""Runs the official JSON Schema suite through the matcher, and writes docs/json-schema.md: `make json-schema-suite`.

No invalid instance may pass. A valid one passes, at the latest with its keys in the order of the schema's properties;
or the schema is refused with the library's reason; the page lists these, and the instances that are no valid ones.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher

from outrider.constraint import Constraint
from outrider.errors import InvalidArgument
from outrider.grammar import GRAMMAR_LIBRARY
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer
from outrider.lm.tokenizer import TOKENIZER_NAME

DRAFTS: Final = ("draft3", "draft4")
_URI: Final = "http://json-schema.org/draft-0{}/schema#"
_TOKENIZER: Final = load_tokenizer(byte_tokenizer().files[TOKENIZER_NAME].decode(), VOCABULARY_SIZE, [EOS])
_MAX_REASON: Final = 120
_NOT_VALID: Final = {
    '"//foo.bar/?baz=qux#quux"': "RFC 3986: a URI begins with its scheme. Later versions of the suite call it invalid"
}
"""Instances, as JSON, that the suite calls valid though their schema's `format` has them invalid, and why."""
_VALID: Final = ("valid, passed", "valid, passed in order", "valid, missed")


@dataclass
class Report:
    """What became of the instances of one draft of the suite.

    Attributes:
        num: of instances by outcome.
        passed: invalid instances that pass: there must be none.
        missed: valid instances that do not pass.
        refused: schemas that are refused, each with the reason.
    """

    num: Counter[str] = field(default_factory=Counter)
    passed: list[str] = field(default_factory=list)
    missed: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str, int]] = field(default_factory=list)


def run(folder: Path, draft: str) -> Report:
    """Run the groups of a draft."""
    report = Report()
    for name, group in _groups(folder / draft):
        schema = group["schema"]
        place = f"{name}: {group['description']}"
        try:
            matcher = compiled(
                Constraint(json_schema=json.dumps({"$schema": _URI.format(draft[-1]), **schema})), _TOKENIZER
            )
        except InvalidArgument as error:
            reason = error.message.removeprefix("constraint: json_schema").lstrip(": ")
            report.refused.append((place, reason[:_MAX_REASON], len(group["tests"])))
            report.num["refused"] += len(group["tests"])
            continue
        for case in group["tests"]:
            _judge(matcher, schema, case, place, report)
    return report


def _judge(matcher: LLMatcher, schema: Any, case: dict[str, Any], place: str, report: Report) -> None:
    passes = _passes(matcher, case["data"])
    if not case["valid"]:
        report.num["invalid, refused" if not passes else "invalid, passed"] += 1
        report.passed += [f"{place}: {case['description']}"] if passes else []
        return
    in_order = passes or _passes(matcher, _ordered(case["data"], _names(schema)))
    report.num["valid, passed" if passes else "valid, passed in order" if in_order else "valid, missed"] += 1
    if not in_order:
        report.missed.append((f"{place}: {case['description']}", json.dumps(case["data"])))


def _passes(matcher: LLMatcher, value: Any) -> bool:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    token_ids = _TOKENIZER.tokenize_bytes(text.encode())
    return matcher.deep_copy().validate_tokens([*token_ids, EOS]) == len(token_ids) + 1


def _names(schema: Any) -> list[str]:
    """Return the names of properties in the order in which a schema has them, its parts before what it combines."""
    names: list[str] = []
    if isinstance(schema, dict):
        names += schema.get("properties", {})
        for part in (item for value in schema.values() for item in (value if isinstance(value, list) else [value])):
            names += _names(part)
    return list(dict.fromkeys(names))


def _ordered(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_ordered(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    order = sorted(value, key=lambda name: names.index(name) if name in names else len(names))
    return {name: _ordered(value[name], names) for name in order}


def _groups(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text()):
            yield path.stem, group


def page(reports: dict[str, Report], version: str) -> str:
    """Return the page about the suite."""
    lines = [
        "# JSON schemas",
        "",
        "What [constraints](structured-output.md) take of JSON Schema, by the official test suite as the npm package "
        f"`json-schema-test-suite` {version} has it, with {GRAMMAR_LIBRARY}. `make json-schema-suite` writes "
        "this page.",
        "",
        "Drafts 4, 6, 7, 2019-09 and 2020-12 are taken, and draft 3 is refused. An object's keys come in the order of "
        "`properties`, so that a valid instance in another order is not what an output would be.",
        "",
        "| suite | instances | invalid, refused | invalid, passed | valid, passed | valid, once in order "
        "| valid, missed | of refused schemas |",
        "|---|---|---|---|---|---|---|---|",
    ]
    outcomes = (
        "invalid, refused",
        "invalid, passed",
        "valid, passed",
        "valid, passed in order",
        "valid, missed",
        "refused",
    )
    for draft, report in reports.items():
        cells = [str(report.num.total()), *(str(report.num[outcome]) for outcome in outcomes)]
        lines.append(f"| {draft} | {' | '.join(cells)} |")
    report = reports["draft4"]
    lines += ["", "## Refused schemas of draft 4", "", "| group | reason | instances |", "|---|---|---|"]
    lines += [f"| {place} | {_cell(reason)} | {num} |" for place, reason, num in report.refused]
    lines += [
        "",
        "## Valid instances of draft 4 that no output would be",
        "",
        "| test | instance | why |",
        "|---|---|---|",
    ]
    lines += [f"| {place} | `{_cell(text)}` | {_NOT_VALID.get(text, '')} |" for place, text in report.missed]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Run the suite in a package's folder, and write the page.

    Exits with 1 where an invalid instance passes, or a valid one does not without a reason.
    """
    package, target = Path(sys.argv[1]), Path(sys.argv[2])
    version = json.loads((package / "package.json").read_text())["version"]
    reports = {draft: run(package / "tests", draft) for draft in DRAFTS}
    target.write_text(page(reports, version))
    for draft, report in reports.items():
        print(f"{draft}: {dict(report.num)}")
    if passed := [place for report in reports.values() for place in report.passed]:
        sys.exit("invalid instances pass: " + "; ".join(passed))
    missed = [place for report in reports.values() for place, text in report.missed if text not in _NOT_VALID]
    if missed:
        sys.exit("valid instances do not pass: " + "; ".join(missed))


if __name__ == "__main__":
    main()
