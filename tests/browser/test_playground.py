"""What people do on the playground, by keyboard alone: nothing here is clicked, and no field is filled by a script."""

import json
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser

from bench.proxy import proxied
from outrider.client import LocalStack
from tests.browser.scene import Playground, healed, playground, serving_target
from tests.orchestrator.http.conftest import give_text
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import orchestrating

pytestmark = [pytest.mark.slow]
SEED = 7


async def expected(stack: LocalStack, prompt: str, num: int) -> str:
    """The text that the API gives without speculation."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num,
        "seed": SEED,
        "speculation": {"disabled": True},
    }
    async with httpx.AsyncClient(base_url=f"http://{stack.http_addresses[0]}", timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        return str(answer.json()["choices"][0]["message"]["content"])


async def seeded(shown: Playground, num: int) -> None:
    """Gives the page a seed and a number of tokens."""
    await shown.write(str(num), into="[name=max_tokens]")
    await shown.write(str(SEED), into="[name=seed]")


async def test_a_prompt_streams_tokens_that_show_their_origins(shown: Playground, stack: LocalStack) -> None:
    # Enough for each origin to occur, also where the machine is so busy that most proposals come late.
    await seeded(shown, 150)
    # The page's first focus is the prompt, so that one may type at once; here it is reached again with Tab.
    await shown.ask("Hello there")
    first = await shown.until("document.querySelector('.answer .token') && performance.now()")
    await shown.until("document.querySelectorAll('.answer .token').length > 10")
    assert not await shown.page.is_disabled("#stop")
    await shown.until_ended()
    assert await shown.page.evaluate("performance.now()") - first > 300
    text = await shown.answer()
    assert text == await expected(stack, "Hello there", 150)

    origins = await shown.origins()
    assert len(origins) == len(text)
    assert set(origins) == {"accepted", "recovered", "bonus"}
    looks = await shown.page.evaluate(
        """["accepted", "recovered", "bonus"].map((origin) => {
          const style = getComputedStyle(document.querySelector(`.answer .token.${origin}`));
          return [style.backgroundColor, style.textDecorationStyle, style.textDecorationLine];
        })"""
    )
    assert len({background for background, _, _ in looks}) == 3
    # Also told apart where colours are not.
    assert len({style for _, style, _ in looks}) == 3
    assert {line for _, _, line in looks} == {"underline"}
    for origin in set(origins):
        assert await shown.text(f"#num-{origin}") == str(origins.count(origin))
    assert 0 < int((await shown.text("#acceptance-rate")).removesuffix(" %")) <= 100
    assert 1 < float(await shown.text("#acceptance-length")) < 20
    assert 5 < float(await shown.text("#speed")) < 1000
    assert int((await shown.text("#first-token")).removesuffix(" ms")) > 0


async def test_without_speculation_the_text_is_the_same_and_every_token_a_bonus(
    shown: Playground, stack: LocalStack
) -> None:
    await seeded(shown, 40)
    await shown.ask("Once upon a time")
    await shown.until_ended()
    with_speculation = await shown.answer()
    await shown.press("Alt+s")
    assert not await shown.page.is_checked("#speculation")
    await shown.press("Alt+n")
    await shown.ask("Once upon a time")
    await shown.until_ended()
    assert await shown.answer() == with_speculation == await expected(stack, "Once upon a time", 40)
    assert set(await shown.origins()) == {"bonus"}
    assert await shown.text("#acceptance-rate") == "\u2013"
    # The switch is one of the keyboard's too, without the shortcut.
    await shown.reach("#speculation")
    await shown.press("Space")
    assert await shown.page.is_checked("#speculation")


async def test_a_comparison_replays_both_sides_at_their_speeds(shown: Playground) -> None:
    await seeded(shown, 60)
    await shown.write("Compare me")
    await shown.press("Alt+c")
    await shown.until("document.querySelector('.verdict')?.textContent.startsWith('Same text: yes')", 60)
    began = await shown.page.evaluate("performance.now()")
    # The faster side is ahead while both are replayed.
    num = "[...document.querySelectorAll('.column')].map((column) => column.querySelectorAll('.token').length)"
    await shown.until(f"({num})[0] > ({num})[1] + 10")
    await shown.until("document.getElementById('stop').disabled")
    lasted_s = (await shown.page.evaluate("performance.now()") - began) / 1000
    texts = await shown.page.evaluate(
        "[...document.querySelectorAll('.column .answer')].map((answer) => answer.textContent)"
    )
    assert texts[0] == texts[1]
    assert len(texts[0]) == 60
    fast, plain = [
        float((await item.inner_text()).removesuffix(" tokens/s"))
        for item in await shown.page.query_selector_all(".column .speed")
    ]
    assert fast > plain
    assert 0.7 * 59 / plain < lasted_s < 1.5 * 59 / plain + 1
    verdict = await shown.text(".verdict")
    assert float(verdict.partition("With speculation: ")[2].partition(" ")[0]) == pytest.approx(fast / plain, abs=0.03)
    # It can be replayed.
    await shown.reach(".comparison > button")
    await shown.press("Enter")
    await shown.until(f"({num})[1] < 30")
    await shown.press("Escape")
    await shown.until(f"({num})[1] === 60", 1)


async def test_a_killed_target_is_told_and_changes_nothing(shown: Playground, stack: LocalStack) -> None:
    await seeded(shown, 120)
    await shown.ask("Survive this")
    await shown.until("document.querySelectorAll('.answer .token').length > 20")
    (await serving_target(stack)).kill()
    try:
        await shown.until("document.querySelector('.notice.target_replaced')?.textContent.includes('Target replaced')")
        assert "tokens_recomputed" in await shown.notices()
        assert await shown.page.evaluate("document.querySelector('.notice').previousElementSibling.matches('.token')")
        await shown.until("document.getElementById('announcer').textContent.includes('Target replaced')")
        await shown.until_ended()
        assert await shown.answer() == await expected(stack, "Survive this", 120)
        assert len(await shown.origins()) == 120
    finally:
        await healed(stack)


async def test_a_killed_draft_is_told_and_changes_nothing(shown: Playground, stack: LocalStack) -> None:
    await seeded(shown, 120)
    await shown.ask("Go on alone")
    await shown.until("document.querySelectorAll('.answer .token').length > 20")
    for process in stack.drafts:
        process.kill()
    try:
        await shown.until("document.querySelector('.notice.draft_lost')?.textContent.includes('Draft lost')")
        await shown.until_ended()
        assert await shown.answer() == await expected(stack, "Go on alone", 120)
        assert (await shown.origins())[-20:] == ["bonus"] * 20
    finally:
        await healed(stack)


async def test_a_broken_connection_continues_behind_its_last_token(browser: Browser, stack: LocalStack) -> None:
    async with proxied(stack.http_addresses[0]) as proxy, playground(browser, proxy.address) as shown:
        await seeded(shown, 100)
        await shown.ask("Cut me")
        await shown.until("document.querySelectorAll('.answer .token').length > 20")
        proxy.reset()
        await shown.until("document.querySelector('.notice.connection')")
        await shown.until_ended()
        assert await shown.answer() == await expected(stack, "Cut me", 100)


async def test_sessions_are_listed_continued_and_removed(shown: Playground) -> None:
    await seeded(shown, 20)
    await shown.ask("My name is Ada")
    await shown.until_ended()
    first = await shown.answer()
    await shown.ask("Go on")
    await shown.until_ended(2)
    await shown.page.reload()
    assert await shown.page.locator("#sessions .open").all_inner_texts() == ["My name is Ada"]
    await shown.reach("#sessions .open")
    await shown.press("Enter")
    await shown.until_ended(2)
    assert await shown.page.locator(".prompt .text").all_inner_texts() == ["My name is Ada", "Go on"]
    kept = await shown.page.evaluate("document.querySelector('.answer').textContent")
    assert kept == first
    await shown.write("20", into="[name=max_tokens]")
    await shown.ask("And on")
    await shown.until_ended(3)
    # The server had the session: nothing was forgotten, and nothing contradicted.
    assert await shown.notices() == []
    assert await shown.page.is_hidden("#error")
    kept = json.loads(await shown.page.evaluate("localStorage.getItem('outrider.sessions')"))
    assert [len(session["turns"]) for session in kept] == [6]
    path = f"/v1/sessions/{kept[0]['id']}"
    async with shown.page.expect_response(lambda response: response.url.endswith(path)) as deleted:
        await shown.reach("#sessions .remove")
        await shown.press("Enter")
    assert (await (await deleted.value).json())["deleted"] is True
    assert await shown.page.locator("#sessions li").count() == 0
    assert await shown.page.evaluate("document.activeElement.id") == "new-session"
    assert await shown.page.evaluate("localStorage.getItem('outrider.sessions')") in (None, "[]")


async def test_an_answer_can_be_stopped_and_the_session_goes_on(shown: Playground) -> None:
    await seeded(shown, 2000)
    await shown.ask("Never end")
    await shown.until("document.querySelectorAll('.answer .token').length > 10")
    await shown.press("Escape")
    await shown.until_ended()
    assert "stopped" in await shown.text(".footer")
    await shown.write("5", into="[name=max_tokens]")
    await shown.ask("Once more")
    await shown.until_ended(2)
    assert await shown.page.is_hidden("#error")
    assert len(await shown.origins()) == 5


async def test_a_completion_continues_its_text(shown: Playground) -> None:
    await seeded(shown, 12)
    await shown.reach("[name=mode]")
    await shown.press("ArrowRight")
    await shown.ask("Once upon")
    await shown.until_ended()
    assert await shown.text(".who >> nth=0") == "Prompt"
    assert len(await shown.origins()) == 12
    await shown.ask(" and then")
    await shown.until_ended(2)
    assert await shown.notices() == []


async def test_an_error_stands_beside_its_field(shown: Playground) -> None:
    await shown.write("-3", into="[name=temperature]")
    await shown.ask("Too cold")
    await shown.until("!document.getElementById('error').hidden")
    assert "temperature" in await shown.text("#error")
    field = shown.page.locator("[name=temperature]")
    assert await field.get_attribute("aria-invalid") == "true"
    described = await field.get_attribute("aria-describedby")
    assert "temperature is -3.0" in await shown.text(f"#{described}")
    # What was written is not lost, and goes through once the field is right.
    assert await shown.page.input_value("#prompt") == "Too cold"
    await shown.write("0.5", into="[name=temperature]")
    await shown.write("5", into="[name=max_tokens]")
    await shown.reach("#prompt")
    await shown.press("Enter")
    await shown.until("document.querySelectorAll('.answer .token').length > 0")
    assert await shown.page.is_hidden("#error")
    assert await field.get_attribute("aria-invalid") is None


async def test_tokens_are_read_one_by_one(shown: Playground) -> None:
    await seeded(shown, 10)
    await shown.ask("Read me")
    await shown.until_ended()
    await shown.reach(".answer")
    await shown.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
    said = await shown.until("document.getElementById('announcer').textContent")
    assert said.endswith("2 of 10")
    assert (await shown.origins())[1] in said
    assert await shown.page.locator(".token.chosen").count() == 1


async def test_markup_of_a_model_or_a_user_is_text(shown: Playground) -> None:
    await shown.write("5", into="[name=max_tokens]")
    await shown.ask("<img src=x onerror=alert(1)><b>bold</b>")
    await shown.until_ended()
    assert await shown.text(".prompt .text") == "<img src=x onerror=alert(1)><b>bold</b>"
    assert await shown.page.locator("#transcript img, #transcript b").count() == 0


async def test_a_tenants_token_is_asked_for_and_stays_in_the_tab(
    browser: Browser, session_store_url: str, target: ScriptedTarget, tmp_path: Path
) -> None:
    give_text(target)
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"acme": {"tokens": ["acme-secret"]}}))
    async with (
        orchestrating(session_store_url, (target,), http_address="127.0.0.1:0", tenants_file=tenants) as running,
        playground(browser, running.http_address) as shown,
    ):
        await shown.until("document.activeElement.id === 'token'")
        await shown.page.keyboard.type("acme-secret")
        await shown.reach("#token-save")
        await shown.press("Enter")
        await shown.until("document.getElementById('model').textContent")
        await shown.write("5", into="[name=max_tokens]")
        await shown.ask("Hello")
        await shown.until_ended()
        assert len(await shown.answer()) == 5
        assert "acme-secret" not in await shown.page.evaluate("JSON.stringify(localStorage) + document.cookie")
        await shown.page.reload()
        await shown.until("document.getElementById('model').textContent")
        assert await shown.page.is_hidden("#token-row")
