"""The names by which clients know the model."""

import time
from collections.abc import Sequence
from pathlib import PurePath

from orchestrator.http.errors import HttpError
from orchestrator.workers.model import Model


class ServedNames:
    """The names of the model over HTTP.

    Args:
        names: as configured; without any, the target's hub id, or the name of its folder.

    Attributes:
        since: when this process began to serve, in seconds since 1970.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.since = int(time.time())

    def of(self, model: Model) -> tuple[str, ...]:
        """Return the names, the first of which is the one that answers carry where the client names none."""
        return self._names or (_name_of(model.name),)

    def check(self, name: str | None, model: Model, *, suffix: str = "") -> None:
        """Raise `HttpError` for a name that the model does not have.

        Args:
            name: the client's; None takes the first.
            model: the model.
            suffix: an end of names that counts for nothing, such as Ollama's ":latest".
        """
        known = self.of(model)
        if name is None or name in known or (suffix and name.removesuffix(suffix) in known):
            return
        problem = f"The model {name[:200]!r} does not exist; there is {', '.join(map(repr, known))}"
        raise HttpError(404, "NotFoundError", problem, "model", "model_not_found")


def _name_of(model: str) -> str:
    """Return the hub id, or the last part of a folder's path."""
    is_folder = model.startswith(("/", ".", "~"))
    return PurePath(model).name or model if is_folder else model
