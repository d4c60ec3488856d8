"""Headers, and metadata of gRPC, by which a gateway brings the requests of a session to one orchestrator."""

from typing import Final

SESSION: Final = "x-outrider-session"
"""The session of a request. It stands beside the body or message, which a gateway does not read; over HTTP it may stand
in place of the body's `session_id`."""
REPLICA: Final = "x-outrider-replica"
"""The orchestrator that responds, where `OUTRIDER_REPLICA` names it."""
