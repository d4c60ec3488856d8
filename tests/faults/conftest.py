"""One stack for all faults; each test breaks it, and it is healed before the next one."""

import os
import re
from collections.abc import AsyncIterator, Callable
from typing import Final

import pytest
import pytest_asyncio

from tests.faults.scene import Scene
from tests.faults.stack import FaultOptions, FaultStack, fault_stack

_NUMBERED: Final = re.compile(r"::test_fault_(\d+)_(\w+)(\[.*\])?$")
_IN_EVERY_RUN: Final = tuple(f"fault_{number}" for number in ("01", "11", "16_killed", "21", "31", "35", "44"))
_reports: list[pytest.TestReport] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves to `make faults` what needs the stack, but for one fault of each group."""
    for item in items:
        needs_stack = "scene" in getattr(item, "fixturenames", ())
        if needs_stack and not any(name in item.name for name in _IN_EVERY_RUN):
            item.add_marker(pytest.mark.slow)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultStack]:
    options = FaultOptions(
        # Memory for some ten sessions of 200 tokens on each target; on drafts for what a soak soon fills.
        target_environment={"OUTRIDER_KV_BUDGET_BYTES": str(1 << 13)},
        draft_environment={"OUTRIDER_KV_BUDGET_BYTES": str(1 << 16)},
    )
    async with fault_stack(tmp_path_factory.mktemp("faults"), options) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def scene(shared_stack: FaultStack, record_property: Callable[[str, object], None]) -> AsyncIterator[Scene]:
    """The stack, whole, with a client of its orchestrators."""
    async with shared_stack.client() as client:
        yield Scene(shared_stack, client, record_property)
    await shared_stack.heal()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps what `make faults` prints at the end."""
    if report.when == "call" or report.failed:
        _reports.append(report)


def pytest_unconfigure() -> None:
    """Prints, for `make faults`, a line for each fault: its number, its name, what was measured, and how it went."""
    if "FAULTS_TABLE" not in os.environ:
        return
    for report in sorted(_reports, key=lambda item: _place(item.nodeid)):
        if match := _NUMBERED.search(report.nodeid):
            figures = " ".join(f"{name}={value}" for name, value in report.user_properties)
            print(f"{match[1]} {match[2].replace('_', ' ')}{match[3] or ''}: {report.outcome} {figures}".rstrip())
    failed = sum(report.failed for report in _reports)
    print(f"{len(_reports) - failed} passed, {failed} failed")


def _place(node: str) -> tuple[int, str]:
    match = _NUMBERED.search(node)
    return (int(match[1]), node) if match else (1000, node)
