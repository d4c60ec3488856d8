"""Who proposed each token, where a draft combines several drafters: in words, in the look of tokens, in a legend."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from playwright.async_api import Browser

from tests.browser.scene import Playground, playground
from tests.browser.test_accessibility import LOOKS, check
from tests.orchestrator.conftest import draft
from tests.orchestrator.http.conftest import give_text, letter
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget
from tests.orchestrator.stage import orchestrating

__all__ = ["draft"]
pytestmark = [pytest.mark.slow]
NAMES: Final = ["eagle3", "suffix", "eagle3+suffix"]
NUM_TOKENS: Final = 40
TOKENS: Final = "[...document.querySelectorAll('.answer .token')]"
LEGEND: Final = "[...document.querySelectorAll('#drafters li')].map((item) => item.innerText)"
EARLIER: Final = [
    {
        "id": "playground-earlier",
        "mode": "chat",
        "system": "",
        "title": "Kept earlier",
        "turns": [
            {"role": "user", "text": "Hi"},
            {"role": "assistant", "text": "One two", "pieces": [["One", "a"], [" two", "b"]], "footer": "2 tokens"},
        ],
        "numTokens": 4,
    }
]
"""Sessions as an earlier version of the page kept them."""


@asynccontextmanager
async def shown_with(
    browser: Browser, url: str, target: ScriptedTarget, draft: ScriptedDraft, **context: Any
) -> AsyncIterator[Playground]:
    """A page whose server has a draft of text, which proposes all tokens but the first ones of rounds."""
    give_text(target)
    target.info.tokenizer_fingerprint = draft.info.tokenizer_fingerprint
    draft.next_token = letter
    async with (
        orchestrating(url, (target,), (draft,), http_address="127.0.0.1:0") as running,
        playground(browser, running.http_address, **context) as shown,
    ):
        yield shown


async def answered(shown: Playground, target: ScriptedTarget) -> None:
    """Asks, and returns once the answer has ended, most of it drafted."""
    if await shown.page.is_hidden("[name=max_tokens]"):
        await shown.reach("#settings-panel summary")
        await shown.press("Enter")
    await shown.write(str(NUM_TOKENS), into="[name=max_tokens]")
    # The draft is open before the second token.
    target.allow(1)
    await shown.ask("Hello")
    await shown.until("document.querySelectorAll('.answer .token').length > 0")
    await target.saw("proposal")
    target.allow(None)
    await shown.until_ended()


async def test_tokens_name_their_drafters_and_the_legend_counts_them(
    browser: Browser, session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    draft.drafters = NAMES
    async with shown_with(browser, session_store_url, target, draft) as shown:
        page = shown.page
        assert await page.is_hidden("#drafters")
        await answered(shown, target)
        script = f"{TOKENS}.map((item) => [item.dataset.origin, item.dataset.drafter ?? '', item.title])"
        tokens = await page.evaluate(script)
        assert len(tokens) == NUM_TOKENS
        words = {"eagle3": "eagle3", "suffix": "suffix", "eagle3+suffix": "eagle3 and suffix"}
        for origin, drafter, title in tokens:
            assert bool(drafter) == (origin == "accepted")
            expected = f"accepted, proposed by {words[drafter]} · token " if drafter else f"{origin} · token "
            assert title.startswith(expected)
        counts = Counter(drafter for _, drafter, _ in tokens if drafter)
        assert list(await page.evaluate(LEGEND)) == [f"{words[name]} {counts[name]}" for name in NAMES]
        assert sum(counts.values()) == int(await shown.text("#num-accepted"))
        # Told apart without colours, and from the tokens of the target.
        looks = f"""[...{json.dumps(NAMES)}.map((name) => `[data-drafter="${{name}}"]`), ".bonus"].map((chosen) =>
          getComputedStyle(document.querySelector(`.answer .token${{chosen}}`)).textDecorationStyle)"""
        assert list(await page.evaluate(looks)) == ["solid", "dashed", "double", "dotted"]
        samples = """[...document.querySelectorAll('#drafters .token')].map((item) =>
          getComputedStyle(item).textDecorationStyle)"""
        assert list(await page.evaluate(samples)) == ["solid", "dashed", "double"]
        await shown.reach(".answer")
        at = next(index for index, (_, drafter, _) in enumerate(tokens) if drafter == "eagle3+suffix")
        await shown.press(*["ArrowRight"] * (at + 1))
        said = await shown.until("document.getElementById('announcer').textContent")
        assert "accepted, proposed by eagle3 and suffix" in said
        # Another session has nothing of them.
        await shown.press("Alt+n")
        assert await page.is_hidden("#drafters")


async def test_a_kept_session_has_its_drafters_and_an_earlier_one_still_opens(
    browser: Browser, session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    draft.drafters = NAMES
    async with shown_with(browser, session_store_url, target, draft) as shown:
        page = shown.page
        await page.evaluate("kept => localStorage.setItem('outrider.sessions', JSON.stringify(kept))", EARLIER)
        await page.reload()
        await shown.reach("#sessions .open")
        await shown.press("Enter")
        await shown.until_ended()
        script = f"{TOKENS}.map((item) => [item.textContent, item.title])"
        assert await page.evaluate(script) == [["One", "accepted"], [" two", "bonus"]]
        assert await page.is_hidden("#drafters")
        await shown.press("Alt+n")
        await answered(shown, target)
        drafters = f"{TOKENS}.map((item) => item.dataset.drafter ?? '')"
        before = await page.evaluate(drafters)
        assert set(before) == {"", *NAMES}
        await page.reload()
        assert await page.is_hidden("#drafters")
        await shown.reach("#sessions .open")
        await shown.press("Enter")
        await shown.until_ended()
        assert await page.evaluate(drafters) == before
        # The figures are those of the latest answer, of which there is none since the page was loaded.
        assert list(await page.evaluate(LEGEND)) == ["eagle3", "suffix", "eagle3 and suffix"]


async def test_a_draft_with_one_drafter_has_no_second_legend(
    browser: Browser, session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    async with shown_with(browser, session_store_url, target, draft) as shown:
        await answered(shown, target)
        assert set(await shown.origins()) == {"accepted", "bonus"}
        assert await shown.page.is_hidden("#drafters")
        assert await shown.page.evaluate("document.querySelector('.token.accepted').title.startsWith('accepted · ')")
        kept = json.loads(await shown.page.evaluate("localStorage.getItem('outrider.sessions')"))
        assert {len(piece) for piece in kept[0]["turns"][1]["pieces"]} == {2}


@pytest.mark.parametrize("look", LOOKS)
async def test_axe_finds_nothing_in_the_legend(
    browser: Browser, session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft, look: str
) -> None:
    draft.drafters = NAMES
    async with shown_with(browser, session_store_url, target, draft, **LOOKS[look]) as shown:
        await answered(shown, target)
        assert await shown.page.is_visible("#drafters")
        await check(shown, "an answer of several drafters")
        width = await shown.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1]
