"""Sends many requests at once from one event loop. The target batches those that run together."""

import asyncio
import sys
import time

from outrider import AsyncClient, SamplingParameters
from outrider.errors import OutriderError

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50050"

ANIMALS = ("owl", "fox", "crane", "otter", "heron", "lynx", "moth", "whale")
AT_ONCE = 4


async def main() -> None:
    """Send all requests, a few at once, and print what came."""
    # One client for the whole program: all requests share its connection.
    async with AsyncClient(address) as client:
        places = asyncio.Semaphore(AT_ONCE)

        async def write(animal: str) -> int:
            """Return the number of tokens of a line about an animal."""
            async with places:
                # A fixed seed gives the same text each time, whatever else runs beside it.
                parameters = SamplingParameters(max_tokens=40, seed=7)
                try:
                    answer = await client.complete(f"The {animal} is", parameters, timeout_s=120)
                except OutriderError as error:
                    # The reason is one of the names in outrider.errors. Overloaded, for one, was retried already.
                    print(f"{animal}: {error.reason}: {error}")
                    return 0
                print(f"{animal}: {answer.text.strip()[:60]!r}")
                return len(answer.token_ids)

        began = time.perf_counter()
        lengths = await asyncio.gather(*(write(animal) for animal in ANIMALS))
        seconds = time.perf_counter() - began
        total = sum(lengths)
        print(f"\n{len(lengths)} requests, {AT_ONCE} at once: {total} tokens, {total / seconds:.0f} a second")


asyncio.run(main())
