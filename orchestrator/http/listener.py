"""The HTTP API put together: guard, routes and server, from the settings."""

import ipaddress
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from orchestrator.api.service import GenerationService
from orchestrator.http.api import ROUTES, Api
from orchestrator.http.app import OPEN_ROUTES, make_app
from orchestrator.http.guard import Guard, HttpMetrics
from orchestrator.http.names import ServedNames
from orchestrator.http.server import HttpServer
from orchestrator.settings import OrchestratorSettings
from outrider.serving.interceptor import CallsInFlight


def http_listener(
    settings: OrchestratorSettings,
    service: GenerationService,
    calls: CallsInFlight,
    is_ready: Callable[[], bool],
    registry: CollectorRegistry,
) -> HttpServer:
    """Return the HTTP server of an orchestrator, not started yet.

    Args:
        settings: addresses, certificates, names.
        service: generates.
        calls: counts the requests that a drain waits for.
        is_ready: whether requests should come here.
        registry: of the process's metrics, which are served here too where there are no tenants.
    """
    exposed = registry if settings.tenants_file is None else None
    api = Api(service, ServedNames(settings.served_model_names), is_ready, exposed)
    guard = Guard(
        make_app(api),
        routes=[path for _, path, _, _ in ROUTES],
        open_routes=OPEN_ROUTES,
        authenticate=service.authenticate,
        calls=calls,
        metrics=HttpMetrics(registry),
        is_local=_is_loopback(settings.http_address),
        hosts=settings.http_hosts,
        origins=settings.http_origins,
    )
    return HttpServer(settings.http_address, guard, settings.tls)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
