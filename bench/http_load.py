"""A load generator that streams completions over HTTP or gRPC, as a process: `python -m bench.http_load`.

Over HTTP it reads lines of server-sent events from a socket, without a client library; over gRPC it reads messages of
the generated stub. Prints one JSON object: tokens, seconds, and the seconds until the first token of each request.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc

PROMPT_LEN = 16


@dataclass(slots=True)
class Load:
    """What was received.

    Attributes:
        num_tokens: of all requests.
        duration_s: of the measurement.
        first_token_s: of each request, from its beginning.
    """

    num_tokens: int = 0
    duration_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)


async def run(kind: str, address: str, num_streams: int, duration_s: float, max_tokens: int) -> Load:
    """Stream so many completions at once, one after another each, for a time."""
    load = Load()
    stream: Callable[[str, int, int, Load], Coroutine[Any, Any, None]] = _over_http if kind == "http" else _over_grpc
    streams = [asyncio.create_task(stream(address, number, max_tokens, load)) for number in range(num_streams)]
    await asyncio.sleep(duration_s / 4)
    # Connections are open, and the first requests are through.
    load.num_tokens, load.first_token_s = 0, []
    began_s = time.perf_counter()
    await asyncio.sleep(duration_s)
    load.duration_s = time.perf_counter() - began_s
    measured = Load(load.num_tokens, load.duration_s, list(load.first_token_s))
    for task in streams:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return measured


async def _over_http(address: str, number: int, max_tokens: int, load: Load) -> None:
    host, _, port = address.rpartition(":")
    body = json.dumps({"prompt": _prompt(number), "max_tokens": max_tokens, "temperature": 0, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        while True:
            began_s = time.perf_counter()
            writer.write(request)
            num = 0
            async for line in reader:
                if line.startswith(b"id: "):
                    so_far = int(line.rpartition(b":")[2])
                    if not num and so_far:
                        load.first_token_s.append(time.perf_counter() - began_s)
                    load.num_tokens += so_far - num
                    num = so_far
                elif line == b"data: [DONE]\n":
                    break
            # The end of the chunk and of the body.
            for _ in range(4):
                await reader.readline()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _over_grpc(address: str, number: int, max_tokens: int, load: Load) -> None:
    # A connection of its own for each stream, as over HTTP.
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while True:
            request = generation_pb2.GenerateRequest()
            request.token_ids.token_ids.extend(_prompt(number))
            request.parameters.max_tokens, request.parameters.temperature = max_tokens, 0
            began_s = time.perf_counter()
            is_first = True
            async for event in stub.Generate(request):
                if num := len(event.delta.token_ids):
                    if is_first:
                        load.first_token_s.append(time.perf_counter() - began_s)
                        is_first = False
                    load.num_tokens += num


def _prompt(number: int) -> list[int]:
    return [number % 251, *range(1, PROMPT_LEN)]


def main() -> None:
    """Run the load that the arguments name: http or grpc, address, streams, seconds, tokens of a request."""
    kind, address, num_streams, duration_s, max_tokens = sys.argv[1:]
    load = asyncio.run(run(kind, address, int(num_streams), float(duration_s), int(max_tokens)))
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    main()
