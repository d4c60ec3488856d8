"""The folder for files that Outrider can make again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
