"""A browser and a stack that the tests share, and a fresh page for each."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from outrider.client import LocalStack
from tests.browser.scene import Playground, chromium, playground, stack_options
from tests.orchestrator.conftest import session_store_url, target
from tests.served.stacks import until_all_in_rotation

__all__ = ["browser", "session_store_url", "shown", "stack", "target"]


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest.fixture(scope="session")
async def stack() -> AsyncIterator[LocalStack]:
    async with LocalStack(stack_options()) as running:
        await until_all_in_rotation(running)
        yield running


@pytest.fixture
async def shown(browser: Browser, stack: LocalStack) -> AsyncIterator[Playground]:
    """The page, fresh."""
    async with playground(browser, stack.http_addresses[0]) as opened:
        yield opened
