"""The playground's files: who gets them, with which headers, and that they load nothing from elsewhere."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from orchestrator.http import playground
from orchestrator.http.playground import PLAYGROUND_ROUTES
from tests.orchestrator.http.conftest import give_text
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import orchestrating

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FOLDER = Path(playground.__file__).parent / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())
NAMESPACES = {"http://www.w3.org/2000/svg"}


class _Page(HTMLParser):
    """Collects what a page loads and links to, its ids, and what its policy would forbid."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.ids: list[str] = []
        self.inline: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href"):
                self.urls.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")
        if tag == "style" or (tag == "script" and "src" not in dict(attrs)):
            self.inline.append(tag)


async def test_browsers_get_the_page_and_everyone_else_the_probe(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<h1>" in page.text
    head = await http.head("/", headers=BROWSER)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == "text/html; charset=utf-8"
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        probe = await http.get("/", headers=headers)
        assert probe.text == "Outrider is running"
        assert (await http.head("/", headers=headers)).headers["content-type"].startswith("text/plain")
        assert probe.headers["vary"] == page.headers["vary"] == "Accept"


async def test_the_page_may_load_from_its_own_server_only(http: httpx.AsyncClient) -> None:
    for path in ("/", *PLAYGROUND_ROUTES):
        headers = (await http.get(path, headers=BROWSER)).headers
        policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
        assert policy.pop("default-src") == "'none'"
        assert set(policy.values()) <= {"'self'", "'none'"}
        assert {"base-uri", "form-action", "frame-ancestors"} <= policy.keys()
        assert headers["x-content-type-options"] == "nosniff"


async def test_all_that_the_page_loads_is_served(http: httpx.AsyncClient) -> None:
    page = _Page((await http.get("/", headers=BROWSER)).text)
    assert page.inline == []
    seen: set[str] = set()
    waiting = [urljoin("/", url) for url in page.urls if not url.startswith("#")]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = await http.get(path, headers=BROWSER)
        assert answer.status_code == 200, path
        if path.endswith(".js"):
            assert answer.headers["content-type"].startswith("text/javascript")
            waiting += [urljoin(path, name) for name in re.findall(r'\bfrom "([^"]+)"', answer.text)]
    assert set(PLAYGROUND_ROUTES) <= seen
    assert {f"/playground/{name}" for name in FILES} == {*PLAYGROUND_ROUTES, "/playground/index.html"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_names_no_other_server_and_sets_no_text_as_markup(name: str) -> None:
    content = (FOLDER / name).read_text()
    assert set(re.findall(r"\bhttps?://[^\s\"'>]+", content)) <= NAMESPACES
    assert not re.search(r"(?:src|href)=[\"']?//|@import|url\(", content)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", content)
    assert len(content.splitlines()) <= 300


def test_scripts_use_elements_that_the_page_has() -> None:
    ids = set(_Page((FOLDER / "index.html").read_text()).ids)
    scripts = "".join(path.read_text() for path in FOLDER.glob("*.js"))
    used = set(re.findall(r"(?:getElementById|\bat)\(\"([\w-]+)\"\)", scripts))
    assert len(used) > 15
    assert used <= ids


async def test_what_a_browser_has_is_not_sent_again(http: httpx.AsyncClient) -> None:
    for path in ("/", "/playground/main.js"):
        first = await http.get(path, headers=BROWSER)
        assert first.headers["cache-control"] == "no-cache"
        again = await http.get(path, headers={**BROWSER, "If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = await http.get(path, headers={**BROWSER, "If-None-Match": '"another"'})
        assert other.content == first.content
    assert (await http.get("/playground/none.js")).status_code == 404


async def test_tenants_get_the_page_without_their_token(
    session_store_url: str, target: ScriptedTarget, tmp_path: Path
) -> None:
    give_text(target)
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"acme": {"tokens": ["acme-secret"]}}))
    async with (
        orchestrating(session_store_url, (target,), http_address="127.0.0.1:0", tenants_file=tenants) as running,
        running.http_client() as client,
    ):
        for path in ("/", *PLAYGROUND_ROUTES):
            assert (await client.get(path, headers=BROWSER)).status_code == 200
        assert (await client.get("/v1/models", headers=BROWSER)).status_code == 401
