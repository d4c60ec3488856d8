"""The scripted orchestrator of the client's tests, for the command line."""

from tests.client.conftest import service

__all__ = ["service"]
