"""Health check of a server on this machine: `python -m outrider.serving readiness` exits with 0 if it is healthy.

For container runtimes without gRPC probes, such as Docker.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S: Final = 5.0
_ADDRESS: Final = "0.0.0.0:50051"
_ANYWHERE: Final = ("", "0.0.0.0", "[::]")


def check(address: str, name: str) -> bool:
    """Return whether the health check of this name at the address is SERVING."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(arguments: Sequence[str]) -> int:
    """Return the exit status; the address is the one that the process's settings name."""
    bound = os.environ.get("OUTRIDER_HEALTH_ADDRESS") or os.environ.get("OUTRIDER_ADDRESS") or _ADDRESS
    host, _, port = bound.rpartition(":")
    here = "127.0.0.1" if host in _ANYWHERE else host
    return 0 if check(f"{here}:{port}", arguments[0] if arguments else "") else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
