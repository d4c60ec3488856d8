"""One stack of Markov models for all tests that end none of its processes."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from outrider.client import DraftOptions, LocalStack, OutriderClient
from tests.served.stacks import (
    OTHER_TOKENIZER,
    SHARED_DRAFT,
    SHARED_TARGET,
    markov_stack,
    until_one_draft_is_in_rotation,
)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_stack() -> AsyncIterator[LocalStack]:
    """A target, a draft that is good and one that does not fit; all of them are still there at the end."""
    drafts = tuple(DraftOptions(drafter="model", model=model) for model in (SHARED_DRAFT, OTHER_TOKENIZER))
    async with LocalStack(replace(markov_stack(exposes_metrics=True), model=SHARED_TARGET, drafts=drafts)) as stack:
        async with stack.client() as client:
            await until_one_draft_is_in_rotation(client)
        yield stack
        assert all(process.is_running for process in stack.processes)


@pytest.fixture
async def client(shared_stack: LocalStack) -> AsyncIterator[OutriderClient]:
    """A client of the shared stack."""
    async with shared_stack.client() as connected:
        yield connected
