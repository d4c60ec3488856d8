"""Settings of the draft process."""

import os
import socket

from pydantic import Field

from outrider.drafters.options import DrafterOptions
from outrider.serving.settings import ServingSettings


class DraftSettings(ServingSettings, DrafterOptions):
    """The draft service: proposes tokens for many sessions, by a small model or by looking them up."""

    replica: str = Field("", description="Name of this replica; empty takes the host's name and the process id.")
    max_sessions: int = Field(256, ge=1, le=65536, description="Sessions drafting at once, at most.")
    max_cached_sessions: int = Field(
        4096, ge=1, le=1 << 20, description="Sessions remembered, drafting or not, at most."
    )
    idle_ttl_s: float = Field(900.0, gt=0, le=604800, description="Seconds that an idle session is remembered.")

    @property
    def replica_name(self) -> str:
        """The name of this replica."""
        return self.replica or f"{socket.gethostname()}-{os.getpid()}"
