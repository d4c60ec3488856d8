"""The settings tables of README.md: `python -m tests.cli.readme_settings` writes them from the settings classes."""

import re
from pathlib import Path

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider.serving.settings import settings_table
from target_service.settings import TargetSettings

README = Path(__file__).parents[2] / "README.md"
_PART = re.compile(r"(<!-- settings: begin .*? -->\n).*?(<!-- settings: end -->)", re.DOTALL)
_SERVICES = {"Target": TargetSettings, "Draft": DraftSettings, "Orchestrator": OrchestratorSettings}


def with_settings(text: str) -> str:
    """Returns the README's text with the tables as they should be."""
    tables = "\n".join(f"### {title}\n\n{settings_table(kind)}" for title, kind in _SERVICES.items())
    return _PART.sub(lambda part: f"{part[1]}\n{tables}\n{part[2]}", text)


if __name__ == "__main__":
    README.write_text(with_settings(README.read_text()))
