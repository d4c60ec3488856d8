"""gRPC channels between processes: they detect a dead peer within seconds and reconnect to a restarted one at once."""

import asyncio
from typing import Final

import grpc

from outrider.errors import Unavailable

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Largest message, both ways. Both ends must have the same, and what travels is cut into parts far below it."""

DEFAULT_KEEPALIVE_S: Final = 20.0
# A ping times out after `keepalive_s`, within these bounds: a machine under load takes two seconds now and then, and a
# healthy peer does not take five.
_LEAST_PING_TIMEOUT_S: Final = 2.0
_MOST_PING_TIMEOUT_S: Final = 5.0
# gRPC's own backoff grows to two minutes, during which a failover that has succeeded goes unnoticed.
_INITIAL_BACKOFF_MS: Final = 100
_MAX_BACKOFF_MS: Final = 2000
_MIN_CONNECT_TIMEOUT_MS: Final = 1000
# gRPC's own 30 s are longer than a rolling update, after which none of the addresses that a name had answers.
_MIN_RESOLUTION_MS: Final = 1000


def open_channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    keepalive_s: float = DEFAULT_KEEPALIVE_S,
    tls_name: str = "",
    balances: bool = False,
) -> grpc.aio.Channel:
    """Return a channel of its own connections, which are made with the first call.

    Args:
        address: host:port, or any gRPC target name.
        credentials: for TLS; without them the connection is plain.
        keepalive_s: seconds of silence after which the peer is pinged; servers take pings five seconds apart. A peer
            that does not answer for as long again, two seconds at least and five at most, counts as dead.
        tls_name: that the peer's certificate must have, where it is not that of the address.
        balances: whether calls go by turns to all addresses of a name, such as those of a headless Service; else all
            go to one of them.
    """
    options: list[tuple[str, int | str]] = [*_options(keepalive_s)]
    if balances:
        options.append(("grpc.lb_policy_name", "round_robin"))
    if tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def answer_timeout_s(keepalive_s: float) -> float:
    """Return how long a peer may take to answer a ping, or to accept a connection, in seconds; see `open_channel`."""
    return min(max(keepalive_s, _LEAST_PING_TIMEOUT_S), _MOST_PING_TIMEOUT_S)


def keepalive_options(keepalive_s: float) -> tuple[tuple[str, int], ...]:
    """Return the options by which a channel or server detects a dead peer; see `open_channel`."""
    timeout_ms = int(1000 * answer_timeout_s(keepalive_s))
    return (
        ("grpc.keepalive_time_ms", int(1000 * keepalive_s)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # gRPC (1.85) never starts the timer of the option before; without this a ping times out after a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


async def wait_connected(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    """Return once the channel is connected; raise `Unavailable` after `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        raise Unavailable(f"{address} could not be reached within {timeout_s:g} s") from None


def _options(keepalive_s: float) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        *keepalive_options(keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", _INITIAL_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", _MIN_CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS),
        ("grpc.dns_min_time_between_resolutions_ms", _MIN_RESOLUTION_MS),
        # A shared connection would also share its backoff with channels to a process that is gone.
        ("grpc.use_local_subchannel_pool", 1),
        # Services connect directly, whatever http_proxy is set to.
        ("grpc.enable_http_proxy", 0),
    )
