"""The client of a cluster's API server.

The `kubernetes` package is imported on the first call, since that takes a second, and memory.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidArgument

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ApiError(Exception):
    """The API server refused a request, or did not answer it.

    Attributes:
        status: the HTTP status; 0 where there was no valid answer.
        reason: what the server, or the connection to it, gave as the reason.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{reason} ({status})" if status else reason)
        self.status = status
        self.reason = reason


class Cluster:
    """A cluster, with one client of its API server, which is made on the first call of `api`.

    Args:
        kubeconfig: a kubeconfig file; None uses the pod's service account.
        context: one of its contexts; empty for the current one.
    """

    def __init__(self, kubeconfig: Path | None, context: str = "") -> None:
        self._kubeconfig = kubeconfig
        self._context = context
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

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """Return the JSON object that the API server answers.

        Args:
            method: such as GET.
            path: with its query, such as /api/v1/nodes.
            body: a JSON object to send.
            timeout_s: bound on the whole call, in seconds.

        Raises:
            InvalidArgument: there is no cluster.
            ApiError: the server refuses, does not answer in time, or answers no JSON object.
        """
        import aiohttp
        from kubernetes.aio.client.exceptions import ApiException

        api = await self.api()
        try:
            async with asyncio.timeout(timeout_s):
                call = await api.param_serialize(
                    method,
                    path,
                    header_params={"Accept": "application/json"},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                response = await api.call_api(*call, _request_timeout=timeout_s)
                text = await response.read()
        except TimeoutError:
            raise ApiError(0, f"no answer within {timeout_s:g} s") from None
        except (ApiException, aiohttp.ClientError, OSError) as error:
            raise ApiError(0, str(error) or type(error).__name__) from None
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not 200 <= response.status < 300:
            reason = answer.get("message") if isinstance(answer, dict) else None
            raise ApiError(response.status, str(reason or response.reason))
        if not isinstance(answer, dict):
            raise ApiError(0, f"{path}: the answer is no JSON object")
        return answer

    async def close(self) -> None:
        """Close the client."""
        if self._api is not None:
            await self._api.close()
            self._api = None

    async def _connected(self) -> Any:
        from kubernetes.aio import client, config
        from kubernetes.aio.config.config_exception import ConfigException

        if self._kubeconfig is None and self._context:
            raise InvalidArgument("a pod's service account has no contexts: give a kubeconfig", "context")
        settings = client.Configuration()
        try:
            if self._kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(
                    config_file=str(self._kubeconfig),
                    context=self._context or None,
                    client_configuration=settings,
                )
        except (ConfigException, OSError) as error:
            raise InvalidArgument(f"no cluster to connect to: {error}", "kubeconfig") from None
        return client.ApiClient(settings)
