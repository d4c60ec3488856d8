"""Takes the pictures of docs/playground.md, with the embedded model: `make playground-pictures`."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from playwright.async_api import Browser

from outrider.client import DraftOptions, LocalStack, StackOptions
from tests.browser.scene import Playground, chromium, healed, playground, serving_target, stack_options
from tests.served.stacks import until_all_in_rotation

FOLDER: Final = Path("docs/pictures")
MAX_BYTES: Final = 200_000
_SEED: Final = "7"
_TO_REPEAT: Final = (
    "Repeat this text three times: The whale swam past the lighthouse at dawn, and the keeper counted three "
    "breaths before it dived below the morning waves."
)


async def main() -> None:
    """Write the pictures that are named, or all."""
    chosen = sys.argv[1:] or [take.__name__.strip("_") for _, takes in _TAKES for take in takes]
    async with chromium() as browser:
        for draft, takes in _TAKES:
            if not {take.__name__.strip("_") for take in takes} & set(chosen):
                continue
            async with LocalStack(_options(draft)) as stack:
                await until_all_in_rotation(stack)
                for take in takes:
                    if take.__name__.strip("_") in chosen:
                        await take(browser, stack)


def _options(draft: DraftOptions) -> StackOptions:
    options = stack_options("embedded", draft)
    names = {**options.orchestrator_environment, "OUTRIDER_SERVED_MODEL_NAMES": "embedded"}
    metrics = {"OUTRIDER_METRICS_ADDRESS": "127.0.0.1:0"}
    return replace(options, orchestrator_environment=names, target_environment=metrics)


async def _prepared(shown: Playground, num: int) -> None:
    for name, value in (("max_tokens", str(num)), ("seed", _SEED), ("temperature", "0")):
        await shown.write(value, into=f"[name={name}]")


async def _save(shown: Playground, name: str) -> None:
    path = FOLDER / f"playground-{name}.png"
    await shown.page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB", flush=True)
    assert size < MAX_BYTES


async def _chat(browser: Browser, stack: LocalStack) -> None:
    async with playground(browser, stack.http_addresses[0], color_scheme="light") as shown:
        await _prepared(shown, 160)
        await shown.ask("Why is the sky blue?")
        await shown.until_ended()
        await shown.ask("And at sunset?")
        await shown.until_ended(2)
        await _save(shown, "chat")


async def _failover(browser: Browser, stack: LocalStack) -> None:
    async with playground(browser, stack.http_addresses[0], color_scheme="dark") as shown:
        await _prepared(shown, 160)
        await shown.ask("Write a short story about a lighthouse keeper and a whale.")
        await shown.until("document.querySelectorAll('.answer .token').length > 60", 120)
        (await serving_target(stack)).kill()
        await shown.until("document.querySelector('.notice.tokens_recomputed')")
        await shown.until_ended()
        await _save(shown, "failover")
    await healed(stack)


async def _comparison(browser: Browser, stack: LocalStack) -> None:
    async with playground(browser, stack.http_addresses[0], color_scheme="light") as shown:
        await _prepared(shown, 110)
        await shown.write(_TO_REPEAT)
        await shown.press("Alt+c")
        num = "[...document.querySelectorAll('.column')].map((column) => column.querySelectorAll('.token').length)"
        # In the middle of the replay.
        await shown.until(f"({num})[0] > 20 && ({num})[1] > 5", 240)
        await _save(shown, "comparison")
        await shown.press("Escape")


async def _narrow(browser: Browser, stack: LocalStack) -> None:
    size = {"width": 390, "height": 844}
    async with playground(browser, stack.http_addresses[0], color_scheme="dark", viewport=size) as shown:
        await shown.ask("What is a whale?")
        await shown.until("document.querySelectorAll('.answer .token').length > 50", 120)
        await _save(shown, "narrow")
        await shown.press("Escape")


_TAKES: Final = (
    (DraftOptions("eagle3+suffix", "embedded", at="target"), (_chat, _failover, _narrow)),
    # N-gram drafts on text that repeats its prompt, the case they are for.
    (DraftOptions("ngram"), (_comparison,)),
)

if __name__ == "__main__":
    asyncio.run(main())
