"""Outputs taken apart as they come: regions between anchors, as a response template has them."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from orchestrator.text.call_readers import Calls, RegionReader
from orchestrator.text.joined_text import JoinedText
from orchestrator.text.parts import CallPiece, Content, Part, Reasoning, merged
from orchestrator.text.region_contents import SEARCH_TIMEOUT_S
from orchestrator.text.region_readers import RawReader, reader_of
from orchestrator.text.response_template import Anchor, Region, ResponseTemplate

_MAX_HELD_CHARS: Final = 4096
"""Longest text that waits for the rest of an anchor."""
_MAX_DONE_CHARS: Final = 4096
_FREE_S: Final = 0.01
"""Of a search: far more than any sensible one takes, and so not counted."""
_LOOKBEHIND_CHARS: Final = 256
"""Text ahead of the position that stays, for expressions that look behind."""


class _Found(NamedTuple):
    """An anchor in the text; `region` begins with it, or the open one ends where it is None."""

    region: Region | None
    match: Any


class ResponseParser:
    """A parser of one output; its parts depend on the pieces of text only.

    No text raises an error: what looks like a call and is none is content.

    Args:
        template: the regions.
        tools: JSON schema of the parameters of each tool, by its name.
        reasoning: whether the reasoning is a part of its own; else it is content.
        calls: whether calls are; else they are content as they stand.
        needs_tool: whether what names no tool is no call.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        reasoning: bool,
        calls: bool,
        needs_tool: bool = False,
    ) -> None:
        self._start = template.start
        self._calls = Calls(tools)
        self._passes_calls = calls
        self._needs_tool = needs_tool
        self._implicit = self._wanted(template.implicit, reasoning)
        regions = [self._wanted(region, reasoning) for region in template.regions]
        is_passed_by = not calls and self._implicit is not None and self._implicit.is_content
        self._regions = [item for item in regions if item is not None and not (item.is_calls and is_passed_by)]
        self._buffer, self._position = "", 0
        self._region: Region | None = None
        self._reader: RegionReader | None = None
        self._content, self._reasoning = JoinedText(), JoinedText()
        if self._implicit is not None:
            self._begin_text(self._implicit)
        self._gives_up = False
        self._left_s = SEARCH_TIMEOUT_S

    def prime(self, prompt: str) -> str:
        """Take the end of the prompt, where the chat template may have begun the answer, such as with `<think>`.

        Returns:
            The text with which the template began the answer.
        """
        try:
            timeout = self._timeout(self._start)
            ends = [found.end() for found in self._start.pattern.finditer(prompt, timeout=timeout)]
        except TimeoutError:
            return ""
        begun = prompt[ends[-1] :] if ends else ""
        self._feed(begun, at_end=False)
        self._content.forget()
        self._reasoning.forget()
        return begun

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.num

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is within the reasoning."""
        return self._region is not None and self._region.is_reasoning

    def push(self, text: str) -> list[Part]:
        """Return the parts that became certain with more text."""
        return merged(self._feed(text, at_end=False)) if text else []

    def finish(self) -> list[Part]:
        """Return the parts that become certain with the end."""
        return merged(self._feed("", at_end=True))

    @staticmethod
    def _wanted(region: Region | None, reasoning: bool) -> Region | None:
        if region is None or reasoning or not region.is_reasoning:
            return region
        return replace(region, name="content")

    def _feed(self, text: str, *, at_end: bool) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        last_empty = -1
        while True:
            found, hold = self._scan(at_end)
            if found is not None and found.match.start() == found.match.end():
                # An anchor without text of its own counts once at its place.
                found = None if last_empty == found.match.start() else found
                hold = len(self._buffer) if found is None else hold
                last_empty = found.match.start() if found is not None else last_empty
            if found is None:
                self._take(parts, len(self._buffer) if at_end else hold)
                break
            self._take(parts, found.match.start())
            if self._is_quoted(found):
                # A character of it at least is text; an anchor that looks ahead has none of its own.
                self._take(parts, found.match.start() + 1)
                continue
            self._position = found.match.end()
            self._close(parts, found)
            if found.region is not None:
                self._open(found.region, found.match)
        if at_end:
            if self._reader is not None:
                self._pass(parts, self._reader.close(""))
                self._reader = None
            parts.append(Content(self._content.end()))
        self._forget_done()
        return parts

    def _is_quoted(self, found: _Found) -> bool:
        """Return whether an anchor is within a text of a call's JSON; those of checkpoints end regions there too."""
        is_closing = found.region is None and self._region is not None and self._region.content == "json-calls"
        return is_closing and self._reader is not None and self._reader.is_in_text

    def _take(self, parts: list[Part], end: int) -> None:
        """Read the text up to a place; outside of regions it opens the implicit one."""
        text, self._position = self._buffer[self._position : end], max(self._position, end)
        if not text:
            return
        if self._reader is None and self._implicit is not None:
            self._reader = self._reader_of(self._implicit, "", {})
            self._begin_text(self._implicit)
        if self._reader is not None:
            self._pass(parts, self._reader.push(text))

    def _open(self, region: Region, match: Any) -> None:
        self._region = region
        captures = {name: value for name, value in match.groupdict().items() if value is not None}
        self._reader = self._reader_of(region, match[0], captures)
        if region.is_content or region.is_reasoning:
            (self._content if region.is_content else self._reasoning).part()
            self._begin_text(region)

    def _begin_text(self, region: Region) -> None:
        if region.is_content or region.is_reasoning:
            is_plain = region.content == "text" and region.transform is None
            text = self._content if region.is_content else self._reasoning
            text.begin(region.arguments if is_plain else {"strip": False}, region.join)

    def _close(self, parts: list[Part], found: _Found) -> None:
        """End the open region, or the implicit one, at the anchor that does."""
        is_implicit = self._region is None
        if self._reader is not None:
            self._pass(parts, self._reader.close("" if is_implicit else found.match[0]))
        is_raw = self._reader is not None and self._reader.is_raw
        if not is_raw and (not is_implicit or found.region is None):
            self._content.part()
        self._region = self._reader = None

    def _pass(self, parts: list[Part], read: Iterable[Part]) -> None:
        """Add parts that were read, their texts without the white space between them."""
        for part in read:
            match part:
                case Content(text):
                    parts.append(Content(self._content.push(text)))
                case Reasoning(text):
                    parts.append(Reasoning(self._reasoning.push(text)))
                case CallPiece():
                    self._content.part()
                    parts.append(part)

    def _reader_of(self, region: Region, opening: str, captures: Mapping[str, str]) -> RegionReader:
        if region.is_calls and not self._passes_calls:
            return RawReader(opening)
        return reader_of(region, opening, captures, self._calls, needs_tool=self._needs_tool)

    def _scan(self, at_end: bool) -> tuple[_Found | None, int]:
        """Return the first anchor that is certain, if any, and where text that may become an anchor begins."""
        hold = len(self._buffer)
        if self._gives_up:
            return None, hold
        best: tuple[tuple[int, int, bool, str], _Found] | None = None
        for region, anchor in self._watched():
            try:
                match, grows = self._searched(anchor, at_end=at_end)
            except TimeoutError:
                self._gives_up = True
                return None, len(self._buffer)
            if match is None:
                continue
            if grows:
                hold = min(hold, match.start())
                continue
            # The first, of these the longest, of these one that opens.
            key = (match.start(), match.start() - match.end(), region is None, region.name if region else "")
            if best is None or key < best[0]:
                best = key, _Found(region, match)
        if len(self._buffer) - hold > _MAX_HELD_CHARS:
            hold = len(self._buffer)
        # An anchor that begins no later may still come to be.
        return (None if best is None or best[1].match.start() >= hold else best[1]), hold

    def _watched(self) -> list[tuple[Region | None, Anchor]]:
        if self._region is not None:
            return [] if self._region.closes is None else [(None, self._region.closes)]
        watched: list[tuple[Region | None, Anchor]] = [
            (region, region.opens) for region in self._regions if region.opens is not None
        ]
        if self._implicit is not None and self._implicit.closes is not None:
            watched.append((None, self._implicit.closes))
        return watched

    def _searched(self, anchor: Anchor, *, at_end: bool) -> tuple[Any, bool]:
        """Return the first match of an anchor, if any, and whether it may become another one with more text.

        Raises:
            TimeoutError: the output has used up its time for a checkpoint's expressions.
        """
        began = time.monotonic()
        timeout = self._timeout(anchor)
        match = anchor.pattern.search(self._buffer, self._position, partial=not at_end, timeout=timeout)
        grows = match is not None and not at_end and (match.partial or self._may_grow(anchor, match, timeout))
        if not anchor.is_linear:
            self._left_s -= max(0.0, time.monotonic() - began - _FREE_S)
        return match, grows

    def _timeout(self, anchor: Anchor) -> float | None:
        """Return the bound on a search; None where it takes no longer than the text is long."""
        if anchor.is_linear:
            return None
        if self._left_s <= 0:
            raise TimeoutError
        return self._left_s

    def _may_grow(self, anchor: Anchor, match: Any, timeout: float | None) -> bool:
        """Return whether a complete match could become another one with more text."""
        if anchor.literals is not None:
            rest = self._buffer[match.start() :]
            return any(text != rest and text.startswith(rest) for text in anchor.literals)
        if match.end() == len(self._buffer):
            return True
        # More text that is no line break and no end: what depends on either of them is not certain.
        longer = anchor.pattern.match(self._buffer + "\x00", match.start(), timeout=timeout)
        return longer is None or longer.span() != match.span() or longer.groupdict() != match.groupdict()

    def _forget_done(self) -> None:
        if self._position > _MAX_DONE_CHARS:
            self._buffer = self._buffer[self._position - _LOOKBEHIND_CHARS :]
            self._position = _LOOKBEHIND_CHARS
