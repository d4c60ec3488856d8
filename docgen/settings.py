"""The page of settings, from the settings classes of the three services and of the plug-in for vLLM."""

from collections.abc import Mapping
from typing import Final

from pydantic_settings import BaseSettings

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider.serving.settings import settings_table
from outrider.vllm.settings import DraftingSettings
from target_service.settings import TargetSettings

_SERVICES: Final[Mapping[str, type[BaseSettings]]] = {
    "Target": TargetSettings,
    "Draft": DraftSettings,
    "Orchestrator": OrchestratorSettings,
    "Drafts for vLLM": DraftingSettings,
}
_TOP: Final = """\
# Settings

Each service takes its settings as options (`python -m target_service --help`) or from the environment: `--log-level`
is `OUTRIDER_LOG_LEVEL`. An option comes before the environment, the environment before the default. `outrider up` takes
the same variables for the services that it starts; its own options are in
[the command line](command-line.md#outrider-up).

A variable that begins with `OUTRIDER_` and is read by none of them nor by `outrider` ends the start, with the nearest
name that is; one that was a setting once is answered with what to do instead.
"""


def page() -> str:
    """Return the page as Markdown."""
    tables = (f"## {title}\n\n{settings_table(kind)}" for title, kind in _SERVICES.items())
    return "\n".join([_TOP, *tables])
