"""A draft process outside of a local stack, which connects to it through a proxy."""

import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from outrider.local.process import ProcessSpec, ServiceProcess

_TIMEOUT_S: Final = 900.0


@asynccontextmanager
async def remote_draft(
    model: str, drafter: str = "model", *, cores: Iterable[int] = (), **settings: object
) -> AsyncIterator[ServiceProcess]:
    """Start a draft with one thread; kill it at the end of the context.

    Args:
        model: model of the draft; empty for the drafter's default.
        drafter: kind of drafter.
        cores: that it runs on, by number; none for those of this process.
        settings: of the draft service, besides.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "OUTRIDER_ADDRESS": "127.0.0.1:0",
            "OUTRIDER_DRAFTER": drafter,
            "OUTRIDER_MODEL": model,
            "OUTRIDER_NUM_THREADS": "1",
            "OUTRIDER_LOG_FORMAT": "text",
            **{f"OUTRIDER_{name.upper()}": str(value) for name, value in settings.items()},
        }
        process = ServiceProcess(
            ProcessSpec("draft-0", "draft_service", variables, cores=frozenset(cores)), Path(folder)
        )
        process.start()
        try:
            await process.wait_ready(_TIMEOUT_S)
            yield process
        finally:
            process.kill()
            await process.wait_ended()
