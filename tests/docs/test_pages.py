"""Links, navigation, length and generated parts of the documentation; `make docs` checks the site itself."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docgen.__main__ import PAGES as GENERATED
from docgen.__main__ import text
from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, name_of

MOST_WORDS = 900


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def test_the_links_of_the_site_stay_within_it() -> None:
    outside = [(name_of(page), link) for page in DOCS.rglob("*.md") for link in links(page) if _leaves(page, link)]
    assert outside == []


def test_pages_without_links_do_not_pass_for_checked() -> None:
    assert len(links(ROOT / "README.md")) > 15
    assert "does-it-help-me" in anchors(DOCS / "performance.md")


def test_the_navigation_has_every_page_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(_paths(nav)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_common_question_is_answered_by_a_page() -> None:
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", (DOCS / "index.md").read_text(), re.MULTILINE)
    rows += re.findall(r"^\| (I come from .+\?) \| (.+) \|$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert len(dict(rows)) == 10
    assert all("](" in answer for _, answer in rows)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == text(name), "run: make docs-pages"


def test_the_recorded_picture_loads_nothing() -> None:
    picture = (DOCS / "pictures" / "takeover-tokens.svg").read_text()
    assert "@import" not in picture and "@font-face" not in picture and "url(http" not in picture
    assert "kill&#160;-9" in picture


def _leaves(page: Path, link: str) -> bool:
    return not (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS)


def _paths(nav: list[dict[str, object]]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                yield from _paths(value)
