"""An OpenTelemetry collector over a real socket, which keeps what it gets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What was exported.

    Attributes:
        spans: by name of the service.
        endpoint: where it listens.
    """

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}
        self.endpoint = ""

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            found = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans.setdefault(str(service), []).extend(found)
        return pb.ExportTraceServiceResponse()

    async def until(self, holds: Callable[["Collector"], bool]) -> None:
        """Returns once something holds for what came."""
        async with asyncio.timeout(20):
            while not holds(self):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Runs a collector."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


def values(attributes: "list[KeyValue]") -> dict[str, object]:
    """Returns attributes as a dictionary."""
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in attributes}
