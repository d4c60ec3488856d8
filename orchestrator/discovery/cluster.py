"""The cluster that this process runs in, or is told of."""

import asyncio
from pathlib import Path
from typing import Any, Final

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Cluster:
    """One client of the API server for all who ask; made when the first one does.

    Args:
        kubeconfig: see `orchestrator.discovery.api.connect`.
    """

    def __init__(self, kubeconfig: Path | None) -> None:
        self._kubeconfig = kubeconfig
        self._api: Any = None
        self._connecting = asyncio.Lock()

    @property
    def namespace(self) -> str:
        """The pod's namespace; `default` outside a pod."""
        return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.is_file() else "default"

    async def api(self) -> Any:
        """Returns the client, a `kubernetes.aio.client.ApiClient`.

        Raises:
            InvalidArgument: there is no cluster.
        """
        async with self._connecting:
            if self._api is None:
                from orchestrator.discovery.api import connect

                self._api = await connect(self._kubeconfig)
        return self._api

    async def close(self) -> None:
        """Closes the client."""
        if self._api is not None:
            await self._api.close()
            self._api = None
