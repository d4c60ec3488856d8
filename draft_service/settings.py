"""Settings of the draft process."""

from outrider.drafters.options import DrafterOptions
from outrider.serving.settings import WorkerSettings


class DraftSettings(WorkerSettings, DrafterOptions):
    """The draft service: proposes tokens for many sessions, by a small model or by lookup in their own texts."""
