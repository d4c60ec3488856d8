"""Calls of a cluster's API server, by the asyncio client of the `kubernetes` package.

Import this module, and those that import it, only where a cluster is asked for: it takes a second, and memory.
"""

from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from outrider.errors import InvalidArgument

API_ERRORS: Final = (ApiException, aiohttp.ClientError, TimeoutError, OSError)
"""What calls of the API server fail with."""


async def connect(kubeconfig: Path | None) -> Any:
    """Returns a client of the API server (`kubernetes.aio.client.ApiClient`); the caller closes it.

    Args:
        kubeconfig: a kubeconfig file, whose current context is taken; None takes the pod's service account.

    Raises:
        InvalidArgument: there is neither.
    """
    settings = client.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=settings)
        else:
            await config.load_kube_config(config_file=str(kubeconfig), client_configuration=settings)
    except (ConfigException, OSError) as error:
        raise InvalidArgument(f"no cluster to ask: {error}", "kubeconfig") from None
    return client.ApiClient(settings)


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error of the API server; 0 where there is none."""
    return int(error.status or 0) if isinstance(error, ApiException) else 0
