"""The gRPC server of every process: health, readiness, and a drain that ends within its budget."""

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from outrider.errors import OutriderError, Unavailable
from outrider.serving.channel import MAX_MESSAGE_BYTES, keepalive_options
from outrider.serving.interceptor import Authenticate, CallInterceptor, CallsInFlight, any_caller
from outrider.serving.metrics import MetricsServer, Readings, gauge, new_registry
from outrider.serving.settings import ServingSettings
from outrider.serving.tls import TlsFiles

_LOG: Final = logging.getLogger(__name__)

# A servicer that has returned may still have its last message to send; idle calls (health watches) are not waited for.
_GRACE_S: Final = 0.3
_UNWIND_S: Final = 0.3
"""Seconds that cancelled calls may take to release what they hold."""
_SWITCH_S: Final = 0.0005
# Calls on one connection; further calls wait in the client. Admission refuses at far fewer.
_MAX_CONCURRENT_STREAMS: Final = 1024
# A connection that pings more often than this is closed; a quarter of the server's own `keepalive_s` where that is
# less, since clients that must detect a failure quickly ping as often.
_LEAST_PING_INTERVAL_S: Final = 5.0
# A generation takes seconds, a long one minutes. A client that reconnects resumes one that was cut.
_MAX_CONNECTION_GRACE_S: Final = 600.0

ServicerT = TypeVar("ServicerT")


LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
"""Names of health checks: whether the process works at all, and whether it should get new work."""
_HEALTH_S: Final = 0.5


async def _nothing_to_drain() -> None:
    """Drain a service that holds nothing between calls."""


def _always() -> bool:
    """Return the health of a service that is healthy as long as it answers."""
    return True


class Listener(Protocol):
    """A further server of the process, which lives and drains with the gRPC server.

    Attributes:
        name: of its address in the announcement.
    """

    name: str

    async def start(self) -> str:
        """Serve; return the bound address. Raises `Unavailable` when the address cannot be bound."""

    async def stop(self) -> None:
        """End all connections, within a second or two."""


class Server:
    """A gRPC server with health, reflection where the settings want it, and the life of the process around it.

    Make it inside the running event loop. What happens, in order:

    1. `start` binds, serves, turns health to SERVING and announces the bound address: one JSON line on stdout, and the
       `ready_file` where one is set.
    2. SIGTERM, SIGINT or `request_stop` begins the drain: health turns NOT_SERVING.
    3. `drain` is awaited: the service closes its admission (new work raises `Draining`), finishes or hands over what it
       has, and ends its streams.
    4. When no call is in flight any more, the server stops. At `drain_budget_s` after 2. it stops regardless, and calls
       that it cancels have 0.3 s more to release what they hold.

    A second signal ends the process at once.

    Health checks may name a service, or `liveness`: whether the process works (its model's thread too), which a drain
    does not change; or `readiness`: whether it should get new work, which a drain and an overload end.

    Args:
        settings: address, limits and the budgets of the drain.
        name: name of the service, for the announcement.
        drain: what the service does in step 3.
        is_live: returns whether the service works; called twice a second.
        is_ready: returns whether it should get new work; likewise.
        registry: its metrics, exposed where the settings have an address for them; None for those of every process.
        authenticate: raises `Unauthenticated` for a call whose metadata has no known token; called before a
            malformed message is refused. Methods check their callers themselves.

    Attributes:
        health_address: where it answers health checks only, once started; empty where it does not.
        metrics_address: where it exposes metrics, once started; empty where it does not.
    """

    def __init__(
        self,
        settings: ServingSettings,
        *,
        name: str,
        drain: Callable[[], Awaitable[None]] = _nothing_to_drain,
        is_live: Callable[[], bool] = _always,
        is_ready: Callable[[], bool] = _always,
        registry: CollectorRegistry | None = None,
        authenticate: Authenticate = any_caller,
    ) -> None:
        self._settings = settings
        self._name = name
        self._drain_service = drain
        self._is_live = is_live
        self._is_ready = is_ready
        self._health_task: asyncio.Task[None] | None = None
        self._calls = CallsInFlight()
        interceptor = CallInterceptor(self._calls, authenticate)
        self._server = grpc.aio.server(interceptors=[interceptor], options=_options(settings))
        self._health = health.aio.HealthServicer()
        self._health_server = grpc.aio.server(interceptors=[interceptor]) if settings.health_address else None
        self._metrics_server: MetricsServer | None = None
        if settings.metrics_address:
            registry = registry or new_registry(name)
            registry.register(Readings(lambda: [gauge("draining", "Whether the drain has begun.", self.draining)]))
            self._metrics_server = MetricsServer(settings.metrics_address, registry)
        self._listeners: list[Listener] = []
        self._listener_addresses: dict[str, str] = {}
        self._names = [health.SERVICE_NAME]
        self._stopping = asyncio.Event()
        self._address = ""
        self.health_address = ""
        self.metrics_address = ""

    @property
    def calls(self) -> CallsInFlight:
        """The calls that a drain waits for; further listeners count theirs here."""
        return self._calls

    @property
    def is_ready(self) -> bool:
        """Whether the service should get new work."""
        return self._is_ready() and not self.draining

    def listen(self, listener: Listener) -> None:
        """Add a further server, before `start`."""
        self._listeners.append(listener)

    def address_of(self, name: str) -> str:
        """Return the bound address of a further server; empty where it is not started."""
        return self._listener_addresses.get(name, "")

    @property
    def draining(self) -> bool:
        """Whether the drain has begun."""
        return self._stopping.is_set()

    def register(
        self, add: Callable[[ServicerT, grpc.aio.Server], None], servicer: ServicerT, service_name: str
    ) -> None:
        """Add a service, before `start`.

        Args:
            add: the generated function, such as `add_WorkerServiceServicer_to_server`.
            servicer: what it serves.
            service_name: full name, such as "outrider.v1.WorkerService".
        """
        add(servicer, self._server)
        self._names.append(service_name)

    async def start(self) -> str:
        """Serve; return the bound address. Raises `Unavailable` when the address cannot be bound."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._settings.reflection:
            self._names.append(reflection.SERVICE_NAME)
            reflection.enable_server_reflection(self._names, self._server)
        self._address = _bind(self._server, self._settings.address, self._settings.tls)
        await self._server.start()
        if self._health_server is not None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            self.health_address = _bind(self._health_server, self._settings.health_address, TlsFiles())
            await self._health_server.start()
        if self._metrics_server is not None:
            self.metrics_address = self._metrics_server.start()
        for listener in self._listeners:
            self._listener_addresses[listener.name] = await listener.start()
        for name in self._names:
            await self._set_health(name, is_well=True)
        await self._update_health()
        self._health_task = asyncio.create_task(self._watch_health())
        self._announce()
        return self._address

    def request_stop(self) -> None:
        """Begins the drain of a server that `run` runs."""
        self._stopping.set()

    async def run(self) -> None:
        """Start, serve until a signal or `request_stop`, drain, and return."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self.start()
            await self._stopping.wait()
            await self.stop()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def stop(self) -> None:
        """Drain and stop within `drain_budget_s`; return when calls that it had to cancel have ended."""
        self._stopping.set()
        _LOG.info("draining", extra={"num_calls": self._calls.count})
        if self._settings.ready_file is not None:
            self._settings.ready_file.unlink(missing_ok=True)
        try:
            async with asyncio.timeout(max(0.0, self._settings.drain_budget_s - _GRACE_S)):
                for name in ("", READINESS, *self._names):
                    await self._set_health(name, is_well=False)
                await self._drain_service()
                await self._calls.wait_idle()
        except TimeoutError:
            _LOG.warning("drain budget exceeded", extra={"num_calls": self._calls.count})
        except Exception:
            _LOG.exception("drain failed")
        if self._health_task is not None:
            self._health_task.cancel()
        await asyncio.gather(self._server.stop(_GRACE_S), *(listener.stop() for listener in self._listeners))
        await self._unwind()
        if self._health_server is not None:
            await self._health_server.stop(_GRACE_S)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        _LOG.info("stopped")

    async def _unwind(self) -> None:
        """Return when the calls that the stop has cancelled have ended: gRPC waits for none of them."""
        try:
            async with asyncio.timeout(_UNWIND_S):
                await self._calls.wait_idle()
        except TimeoutError:
            _LOG.warning("cancelled calls do not end", extra={"num_calls": self._calls.count})

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_S)
            await self._update_health()

    async def _update_health(self) -> None:
        await self._set_health(LIVENESS, is_well=self._is_live())
        await self._set_health(READINESS, is_well=self.is_ready)

    async def _set_health(self, name: str, *, is_well: bool) -> None:
        states = health_pb2.HealthCheckResponse
        await self._health.set(name, states.SERVING if is_well else states.NOT_SERVING)

    def _announce(self) -> None:
        line = {"ready": True, "service": self._name, "address": self._address, "pid": os.getpid()}
        if self.health_address:
            line["health_address"] = self.health_address
        if self.metrics_address:
            line["metrics_address"] = self.metrics_address
        line |= self._listener_addresses
        print(json.dumps(line), flush=True)
        ready_file = self._settings.ready_file
        if ready_file is not None:
            # Renamed into place, so that no reader of the file sees half an address.
            partial = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
            partial.write_text(self._address)
            partial.replace(ready_file)

    def _on_signal(self, number: int) -> None:
        if self.draining:
            os._exit(128 + number)
        self.request_stop()


def _bind(server: grpc.aio.Server, address: str, tls: TlsFiles) -> str:
    """Bind a server, over TLS where there is a certificate; return the bound address."""
    try:
        if tls.certificate is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        raise Unavailable(f"cannot listen on {address}") from None
    host, separator, _ = address.rpartition(":")
    return address if not separator or address.startswith("unix:") else f"{host}:{port}"


def begin_loading() -> None:
    """Pause garbage collection until `tune_interpreter`. Call it before the model's libraries are imported.

    Nearly everything that they make stays, and looking through it again and again is a fifth of the start.
    """
    gc.disable()


def tune_interpreter() -> None:
    """Tune the interpreter for an engine thread beside the event loop. Call it when the model is loaded.

    The engine's thread reacquires the GIL some hundred times a pass and must not wait 5 ms each time; and garbage
    collection over all objects of the model and its libraries would stall every session.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.enable()


def run_process(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's coroutine; exit with 1 and one line on standard error when an `OutriderError` ends it."""
    try:
        asyncio.run(main)
    except OutriderError as error:
        print(f"{error.reason}: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _options(settings: ServingSettings) -> list[tuple[str, int]]:
    options = {
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_concurrent_streams": _MAX_CONCURRENT_STREAMS,
        # Without this, pings end long generations that send nothing for a while.
        "grpc.http2.min_ping_interval_without_data_ms": _ms(min(_LEAST_PING_INTERVAL_S, settings.keepalive_s / 4)),
        **dict(keepalive_options(settings.keepalive_s)),
        # Otherwise two processes could listen on one port and share its calls unnoticed.
        "grpc.so_reuseport": 0,
    }
    if settings.max_connection_age_s is not None:
        options["grpc.max_connection_age_ms"] = _ms(settings.max_connection_age_s)
        grace_s = min(_MAX_CONNECTION_GRACE_S, settings.max_connection_age_s)
        options["grpc.max_connection_age_grace_ms"] = _ms(grace_s)
    return list(options.items())


def _ms(seconds: float) -> int:
    return int(1000 * seconds)
