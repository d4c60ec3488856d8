"""The scripted draft that the orchestrator's tests have too."""

from tests.orchestrator.conftest import draft

__all__ = ["draft"]
