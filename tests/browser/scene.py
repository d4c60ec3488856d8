"""A stack with HTTP and a browser in front of it, and a page that is used by its keyboard alone."""

import asyncio
import os
import re
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Page, Route, async_playwright

from outrider.client import DraftOptions, LocalStack, StackOptions
from outrider.local.process import ServiceProcess
from tests.served.stacks import until_all_in_rotation

TARGET = "markov:text=1,seed=5,step_s=0.03"
DRAFT = "markov:text=1,seed=5,noise=0.4,step_s=0.001"
_RUNNING = re.compile(r"^outrider_target_sessions_running(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_MAX_STOPS = 80
_POLL_S = 0.02
_LAST_TOKENS = "[...[...document.querySelectorAll('.answer')].at(-1).querySelectorAll('.token')]"


def stack_options(model: str = TARGET, draft: DraftOptions | None = None) -> StackOptions:
    """Returns a stack with two targets, of which one may be killed."""
    return StackOptions(
        model=model,
        drafts=(draft or DraftOptions("model", DRAFT),),
        num_targets=2,
        target_threads=1,
        target_environment={"OUTRIDER_METRICS_ADDRESS": "127.0.0.1:0", "OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={"OUTRIDER_HTTP_ADDRESS": "127.0.0.1:0", "OUTRIDER_SERVED_MODEL_NAMES": "model"},
    )


async def serving_target(stack: LocalStack) -> ServiceProcess:
    """Returns the target that runs the request, once one does."""
    async with asyncio.timeout(20):
        while True:
            for process in stack.targets:
                if process.is_running and await asyncio.to_thread(_num_running, process) > 0:
                    return process
            await asyncio.sleep(0.02)


def _num_running(process: ServiceProcess) -> float:
    with urllib.request.urlopen(f"http://{process.metrics_address}/metrics", timeout=10) as answer:
        found = _RUNNING.search(answer.read().decode())
    assert found is not None
    return float(found[1])


async def healed(stack: LocalStack) -> None:
    """Returns once every worker runs again and is in rotation."""
    for process in (*stack.targets, *stack.drafts):
        if not process.is_running:
            process.restart()
            await process.wait_ready(60)
    await until_all_in_rotation(stack)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Debian's Chromium, headless; `OUTRIDER_CHROMIUM` names another one."""
    path = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
    assert path, "there is no chromium: run `make browser`, which installs Debian's"
    # Its sandbox needs rights that containers do not give; it opens pages of this machine only.
    arguments = ["--no-sandbox", "--force-prefers-no-reduced-motion"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


class Playground:
    """A page in a context of its own, with nothing stored.

    Args:
        page: the page.
        url: where it is served.

    Attributes:
        problems: errors of scripts, refusals of the Content-Security-Policy, and requests to other servers.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self._note(message.type, message.text))

    def _note(self, kind: str, text: str) -> None:
        # The browser itself writes a line for each status that is an error, and for each connection that broke.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.problems.append(text)

    async def open(self) -> None:
        """Opens the page; returns when it shows its model."""
        await self.page.route("**/*", self._own_only)
        await self.page.goto(self.url)
        await self.until("document.getElementById('model').textContent || !document.getElementById('error').hidden")

    async def _own_only(self, route: Route) -> None:
        if route.request.url.startswith(self.url):
            await route.continue_()
            return
        self.problems.append(f"requests {route.request.url}")
        await route.abort()

    async def press(self, *keys: str) -> None:
        """Presses keys, one after the other."""
        for key in keys:
            await self.page.keyboard.press(key)

    async def write(self, text: str, *, into: str = "#prompt") -> None:
        """Replaces the text of a field, which is reached with Tab."""
        await self.reach(into)
        await self.press("Control+a", "Delete")
        await self.page.keyboard.type(text)

    async def ask(self, text: str) -> None:
        """Writes a prompt and sends it."""
        await self.write(text)
        await self.press("Enter")

    async def reach(self, selector: str) -> None:
        """Moves the focus to an element with Tab alone."""
        for _ in range(_MAX_STOPS):
            if await self.page.evaluate("selector => document.activeElement?.matches(selector) ?? false", selector):
                return
            await self.press("Tab")
        raise AssertionError(f"Tab does not reach {selector}")

    async def until(self, condition: str, timeout_s: float = 30) -> Any:
        """Returns the value of an expression once it is true."""
        # The page's policy forbids what `Page.wait_for_function` does: to evaluate text from within the page.
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self.page.evaluate(condition)):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s: {condition}; problems: {self.problems}") from None
        return value

    async def until_ended(self, num_answers: int = 1) -> None:
        """Returns once so many answers, restored ones included, have ended."""
        await self.until(
            f"[...document.querySelectorAll('.turn .footer')].filter(item => item.textContent).length === {num_answers}"
            " && document.getElementById('stop').disabled",
            timeout_s=60,
        )

    async def text(self, selector: str) -> str:
        """The text of an element."""
        return await self.page.inner_text(selector)

    async def origins(self) -> list[str]:
        """Origins of the tokens of the last answer."""
        return list(await self.page.evaluate(_LAST_TOKENS + ".map((item) => item.dataset.origin)"))

    async def answer(self) -> str:
        """The text of the last answer, without notices."""
        return "".join(await self.page.evaluate(_LAST_TOKENS + ".map((item) => item.textContent)"))

    async def notices(self) -> list[str]:
        """Kinds of the notices on the page."""
        script = "[...document.querySelectorAll('.notice')].map((item) => item.dataset.kind)"
        return list(await self.page.evaluate(script))


@asynccontextmanager
async def playground(browser: Browser, address: str, **context: Any) -> AsyncIterator[Playground]:
    """The page of a server, which nothing may go wrong on."""
    opened = await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    try:
        shown = Playground(await opened.new_page(), f"http://{address}/")
        await shown.open()
        yield shown
        assert shown.problems == []
    finally:
        await opened.close()
