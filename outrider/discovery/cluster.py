"""The client of a cluster's API server.

The `kubernetes` package is imported on the first call, since that takes a second, and memory.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidArgument

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Cluster:
    """A cluster, with one client of its API server, which is made on the first call of `api`.

    Args:
        kubeconfig: a kubeconfig file, whose current context is used; None uses the pod's service account.
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
        """Return the client, a `kubernetes.aio.client.ApiClient`.

        Raises:
            InvalidArgument: there is no cluster.
        """
        async with self._connecting:
            if self._api is None:
                self._api = await self._connected()
        return self._api

    async def close(self) -> None:
        """Close the client."""
        if self._api is not None:
            await self._api.close()
            self._api = None

    async def _connected(self) -> Any:
        from kubernetes.aio import client, config
        from kubernetes.aio.config.config_exception import ConfigException

        settings = client.Configuration()
        try:
            if self._kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(config_file=str(self._kubeconfig), client_configuration=settings)
        except (ConfigException, OSError) as error:
            raise InvalidArgument(f"no cluster to connect to: {error}", "kubeconfig") from None
        return client.ApiClient(settings)
