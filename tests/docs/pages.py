"""The Markdown pages that readers see, and what is in them: code blocks, links, anchors."""

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(
    (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "k8s" / "README.md"), key=lambda page: page.relative_to(ROOT)
)
_FENCE: Final = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_CODE: Final = re.compile(r"`[^`\n]*`")
_LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    language: str
    text: str


@cache
def name_of(page: Path) -> str:
    """Returns a page's path below the repository's root."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Returns the code blocks of a page."""
    found = _FENCE.findall(page.read_text())
    return [Block(name_of(page), language, re.sub(rf"(?m)^{indent}", "", text)) for indent, language, text in found]


def links(page: Path) -> list[str]:
    """Returns where the links and pictures of a page lead, but for those to other sites."""
    found = _LINK.findall(_CODE.sub("", _FENCE.sub("", page.read_text())))
    return [link for link in found if "://" not in link]


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as both the site and forges make them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        slug = _slug(heading)
        found.add(f"{slug}_{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """Yields the command lines of a shell block, split into words, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def _slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    ascii_ = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_).strip().lower())
