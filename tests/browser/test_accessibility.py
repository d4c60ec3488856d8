"""The playground for everyone: no finding of axe in any theme and width, a focus that is seen and follows the page."""

from typing import Any, Final

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser

from outrider.client import LocalStack
from tests.browser.scene import Playground, playground

pytestmark = [pytest.mark.slow]
NARROW: Final = {"width": 360, "height": 740}
LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"color_scheme": "light", "viewport": NARROW},
    "narrow and dark": {"color_scheme": "dark", "viewport": NARROW},
}


async def check(shown: Playground, state: str) -> None:
    """Fails with what axe finds, rules of WCAG 2.2 AA and best practices."""
    results = (await Axe().run(shown.page)).response
    # It has seen the page, and judged its contrasts.
    assert len(results["passes"]) > 15
    assert "color-contrast" in {item["id"] for item in results["passes"]}
    found = [
        f"{state}: {item['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for item in results["violations"]
        for node in item["nodes"]
    ]
    assert found == []


@pytest.mark.parametrize("look", LOOKS)
async def test_axe_finds_nothing(browser: Browser, stack: LocalStack, look: str) -> None:
    async with playground(browser, stack.http_addresses[0], **LOOKS[look]) as shown:
        page = shown.page
        await check(shown, "empty")
        if not await page.evaluate("document.getElementById('settings-panel').open"):
            await shown.reach("#settings-panel summary")
            await shown.press("Enter")
        await shown.write("30", into="[name=max_tokens]")
        await shown.ask("Hello")
        await shown.until_ended()
        # Notices of all kinds look alike; a real one is in another test.
        await page.evaluate(
            """for (const kind of ["target_replaced", "tokens_recomputed", "prefill"]) {
              const note = document.createElement("span");
              note.className = `notice ${kind}`;
              note.textContent = "3 tokens recomputed";
              document.querySelector(".answer").append(note);
            }"""
        )
        await check(shown, "an answer")
        await shown.write("Hello")
        await shown.press("Alt+c")
        await shown.until("document.querySelector('.comparison > button:not([hidden])')", 60)
        await shown.until("document.getElementById('stop').disabled")
        await check(shown, "a comparison")
        await shown.write("-3", into="[name=temperature]")
        await shown.ask("Too cold")
        await shown.until("!document.getElementById('error').hidden")
        await check(shown, "an error")
        await shown.reach("#help-open")
        await shown.press("Enter")
        await shown.until("document.getElementById('help').open")
        await check(shown, "the keys")
        await shown.press("Escape")
        assert not await page.evaluate("document.getElementById('help').open")


@pytest.mark.parametrize("width", [320, 360, 800, 1280])
async def test_nothing_is_wider_than_the_screen(browser: Browser, stack: LocalStack, width: int) -> None:
    size = {"width": width, "height": 700}
    async with playground(browser, stack.http_addresses[0], viewport=size) as shown:
        await shown.ask("Hello" + "o" * 200)
        await shown.until_ended()
        assert await shown.page.evaluate("document.documentElement.scrollWidth") <= width
        # Neither is anything wider than its part of the page, where it would be cut off.
        script = """[...document.querySelectorAll(".panel, main, #transcript")]
          .filter((part) => part.scrollWidth > part.clientWidth).map((part) => part.outerHTML.slice(0, 100))"""
        assert await shown.page.evaluate(script) == []


async def test_the_focus_is_seen_and_follows_the_page(shown: Playground) -> None:
    await shown.reach(".skip")
    script = """() => {
      const item = document.activeElement;
      const style = getComputedStyle(item);
      const name = item.id || item.name || item.className || item.tagName;
      return [name, style.outlineStyle, parseFloat(style.outlineWidth)];
    }"""
    stops: list[str] = []
    while True:
        name, style, width = await shown.page.evaluate(script)
        if name in ("BODY", "skip") and stops:
            break
        assert style != "none", name
        assert width >= 2, name
        stops.append(name)
        await shown.press("Tab")
    order = [
        "skip",
        "help-open",
        "theme",
        "new-session",
        "transcript",
        "mode",
        "speculation",
        "prompt",
        "send",
        "temperature",
    ]
    assert [name for name in stops if name in order] == order


async def test_themes_follow_the_system_until_one_is_chosen(browser: Browser, stack: LocalStack) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with playground(browser, stack.http_addresses[0], color_scheme="dark") as shown:
        dark = await shown.page.evaluate(background)
        await shown.page.emulate_media(color_scheme="light")
        light = await shown.page.evaluate(background)
        assert light != dark
        await shown.reach("#theme")
        await shown.press("Enter")
        assert await shown.page.evaluate(background) == dark
        await shown.page.reload()
        assert await shown.page.evaluate(background) == dark
        await shown.reach("#theme")
        await shown.press("Enter")
        await shown.page.emulate_media(color_scheme="dark")
        assert await shown.page.evaluate(background) == light


async def test_keys_lead_to_the_prompt_and_to_help(shown: Playground) -> None:
    await shown.reach("#new-session")
    await shown.press("/")
    assert await shown.page.evaluate("document.activeElement.id") == "prompt"
    await shown.press("?")
    # In a field, keys are text.
    assert await shown.page.input_value("#prompt") == "?"
    await shown.reach("#send")
    await shown.press("?")
    assert await shown.page.evaluate("document.getElementById('help').open")
