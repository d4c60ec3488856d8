"""How a model writes reasoning and calls of tools: by its response template, else by the family of its chat template.

Families are found by the markers in their chat templates, and described as response templates of our own.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.text.response_template import Region, ResponseTemplate, load_response_template
from outrider.constraint import StructuralTag

_LOG: Final = logging.getLogger(__name__)
_NAME: Final = r"[\w.-]{1,64}"
HERMES_CALL: Final = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
"""A call as Hermes and Qwen write it; also how models are told to write it whose chat template knows no tools."""


@dataclass(frozen=True, slots=True)
class CallText:
    """The text of a call, but for its name and its arguments: what constraints are made of.

    Attributes:
        begin: ahead of the arguments, with `{name}` for the name.
        end: behind them.
        trigger: the beginning of `begin` that no other text has.
    """

    begin: str
    end: str
    trigger: str

    def tag(self, name: str, schema: str) -> StructuralTag:
        """Return the tag of the calls of a tool; `schema` is that of its arguments, empty for any object."""
        # Names are letters, digits and the like: they need no escapes within JSON.
        return StructuralTag(self.begin.replace("{name}", name), schema, self.end, self.trigger)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and calls.

    Attributes:
        template: the regions of its output.
        call: the text of a call; None where arguments are not written as JSON.
        needs_tool: whether only the name of a tool makes a call, because nothing else marks it.
        no_call: expressions of whole texts that may be taken for calls where nothing marks those, in Rust's syntax.
        is_own: whether it is the checkpoint's own response template.
    """

    template: ResponseTemplate
    call: CallText | None
    needs_tool: bool = False
    no_call: tuple[str, ...] = ()
    is_own: bool = False

    @property
    def reasoning_begin(self) -> str:
        """The text that begins the reasoning; empty where there is none, or none of one text."""
        region = self.template.reasoning
        anchor = region.opens if region else None
        if anchor is not None and anchor.literals:
            return anchor.literals[0]
        # Those of the families differ from their ends by the stroke.
        return "" if self.is_own else self.reasoning_end.replace("/", "")

    @property
    def reasoning_end(self) -> str:
        """The text that ends the reasoning; empty where there is none, or none of one text."""
        region = self.template.reasoning
        anchor = region.closes if region else None
        return anchor.literals[0] if anchor is not None and anchor.literals else ""


def output_format(
    response_template: str | None, chat_template: str | None, *, knows_tools: bool = True
) -> OutputFormat:
    """Return how a model writes reasoning and calls.

    Args:
        response_template: the checkpoint's own, as JSON text; None without one. One that cannot be read is logged.
        chat_template: its source; None without one.
        knows_tools: whether the chat template has a place for tools; else calls are as `tool_prompt` describes them.
    """
    source = chat_template or ""
    if response_template is not None:
        try:
            template = load_response_template(json.loads(response_template))
            return OutputFormat(template, _call_text(template.calls, source), is_own=True)
        except (ValueError, RecursionError) as error:
            _LOG.warning("the model's response template is not used: %s", error)
    return _family(source) if knows_tools else _hermes(source)


def _family(source: str) -> OutputFormat:
    """Return the format of the family that a chat template belongs to."""
    if "<function=" in source and "<tool_call>" in source:
        return OutputFormat(_template(source, _QWEN_XML), None)
    if "<arg_key>" in source and "<tool_call>" in source:
        return OutputFormat(_template(source, _GLM_XML), None)
    if "[TOOL_CALLS]" in source:
        return OutputFormat(_template(source, _MISTRAL), _mistral_call(source))
    if "<|python_tag|>" in source:
        return _bare(source, "parameters")
    if "<tool_call>" in source:
        return _hermes(source)
    return _bare(source, "arguments")


def _bare(source: str, key: str) -> OutputFormat:
    """Return the format of calls that begin an answer, marked or not; their arguments are under a key."""
    _, end = _reasoning_markers(source)
    ends = [_escaped(end)] if end else []
    behind = "".join(f"|(?<={end})" for end in ends)
    marked = rf"<\|python_tag\|>{_SPACE}"
    opens = rf"(?:\A{behind}){_BARE_MARK}(?={_BARE_CALL})|{marked}(?=\{{)"
    calls = {
        # White space that is matched is not tried again, so that the time does not grow with its square.
        "open_pattern": opens.replace(_SPACE, f"{_SPACE}+"),
        "content": "json-calls",
    }
    within = (*ends, rf"{marked}\{{")
    no_call = (rf"{_BARE_MARK}{_BARE_CALL}(.|\n)*", *(rf"(.|\n)*{text}(.|\n)*" for text in within))
    call = CallText(f'{{"name": "{{name}}", "{key}": ', "}", '{"name": ')
    return OutputFormat(_template(source, calls), call, needs_tool=True, no_call=no_call)


def _hermes(source: str) -> OutputFormat:
    begin, end = HERMES_CALL.format(name='"{name}"', arguments="\0").split("\0")
    return OutputFormat(_template(source, _HERMES), CallText(begin, end, "<tool_call>"))


_HERMES: Final[Mapping[str, Any]] = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json-calls",
}
_QWEN_XML: Final[Mapping[str, Any]] = {
    "open_pattern": rf"<tool_call>\s*<function=(?P<name>{_NAME})>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "tagged-values",
    "content_args": {"begin": r"<parameter=([^>\n]{1,256})>", "end": "</parameter>"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}
_GLM_XML: Final[Mapping[str, Any]] = {
    "open_pattern": rf"<tool_call>\s*(?P<name>{_NAME})\s*(?=<arg_key>|</tool_call>)",
    "close": "</tool_call>",
    "content": "tagged-values",
    "content_args": {"begin": r"<arg_key>([^<\n]{1,256})</arg_key>\s{0,64}<arg_value>", "end": "</arg_value>"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}
_CALL_ID: Final = r"(?:\[CALL_ID\]\s*+\w{1,64}+\s*+)?"
_MISTRAL: Final[Mapping[str, Any]] = {
    # A list of calls, or the name, in some models an id, and then the arguments.
    "open_pattern": rf"\[TOOL_CALLS\]\s*(?:(?P<name>{_NAME})\s*+{_CALL_ID}(?:\[ARGS\])?\s*+(?=\{{)|(?=\[\s*\{{))",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "content": "json-calls",
}
_SPACE: Final = r"[ \t\r\n]*"
_BARE_MARK: Final = rf"{_SPACE}(?:<\|python_tag\|>{_SPACE}|```(?:json)?{_SPACE})?"
_BARE_CALL: Final = rf"(?:\[{_SPACE})?\{{{_SPACE}\"(?:name|type|function)\""


def _template(source: str, calls: Mapping[str, Any]) -> ResponseTemplate:
    """Return the template of a family, with the reasoning that the chat template mentions."""
    content = {"repeats": True, "join": "\n", "content_args": {"strip_ends": False}}
    fields: dict[str, Any] = {"content": content, "tool_calls": calls}
    begin, end = _reasoning_markers(source)
    if not begin:
        return load_response_template({"fields": fields, "start_anchor_pattern": r"(?!)"}, is_own=True)
    # An answer may be about the marker, so only its beginning is reasoning.
    fields["reasoning"] = {"open_pattern": rf"\A\s*+{_escaped(begin)}", "close": end}
    return load_response_template({"fields": fields, "start_anchor_pattern": _prefilled(begin)}, is_own=True)


def _reasoning_markers(source: str) -> tuple[str, str]:
    """Return what begins and what ends reasoning, of which the chat template mentions one; empty without."""
    pairs = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
    return next((pair for pair in pairs if pair[0] in source or pair[1] in source), ("", ""))


def _escaped(marker: str) -> str:
    return marker.replace("[", r"\[").replace("]", r"\]")


def _prefilled(begin: str) -> str:
    """Return the expression of the place ahead of a marker that ends the prompt."""
    return rf"(?={_escaped(begin)}\s*\Z)"


def _mistral_call(source: str) -> CallText:
    if "[ARGS]" in source:
        return CallText("[TOOL_CALLS]{name}[ARGS]", "", "[TOOL_CALLS]")
    return CallText('[TOOL_CALLS][{"name": "{name}", "arguments": ', "}]", "[TOOL_CALLS]")


def _call_text(region: Region | None, source: str) -> CallText | None:
    """Return the text of the calls that a region reads; None where it cannot be told."""
    if region is None or region.content != "json" or region.arguments or region.transforms_each:
        return None
    opening = region.opens.literals if region.opens else None
    closing = region.closes.literals if region.closes else ("",)
    name, arguments = region.call_keys
    if not opening or closing is None or not (name.startswith("{content.") and arguments.startswith("{content.")):
        return None
    keys = [item.removeprefix("{content.").removesuffix("}") for item in (name, arguments)]
    # As the chat template writes it, which the model has learnt.
    line = "\n" if any(f"{opening[0]}{end}" in source for end in ("\n", "\\n")) else ""
    begin = f'{opening[0]}{line}{{"{keys[0]}": "{{name}}", "{keys[1]}": '
    return CallText(begin, f"}}{line}{closing[0]}", opening[0])
