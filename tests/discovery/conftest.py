"""The scripted workers, the API server and the session store that the orchestrator's tests have too."""

from tests.orchestrator.conftest import draft, server, session_store_url, target

__all__ = ["draft", "server", "session_store_url", "target"]
