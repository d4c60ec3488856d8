"""Streams of clients while something is done to the cluster: what came, what the log holds, and when."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.client import GenerationRequest, OutriderClient
from tests.faults.history import Record, check, read_log, watch
from tests.faults.scene import asking, learn, plain

_REQUEST_S = 240.0
NUM_TOKENS = 300


@dataclass(slots=True)
class Streams:
    """What came of all streams.

    Attributes:
        records: of the streams that ended.
        struck_s: when it was done, by `time.monotonic`; 0 while it was not.
    """

    records: list[Record] = field(default_factory=list)
    struck_s: float = 0.0

    @property
    def num_failed(self) -> int:
        """Streams that ended with an error."""
        return sum(record.error is not None for record in self.records)

    @property
    def num_tokens(self) -> int:
        """Tokens that clients were given."""
        return sum(len(record.token_ids) for record in self.records)

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two deltas of a stream."""
        return max(record.longest_gap_s for record in self.records)

    @property
    def next_token_s(self) -> float:
        """Longest wait of a stream for its next token, from the strike on: it may take effect a moment after it."""
        waits = (
            after - max(before, self.struck_s)
            for record in self.records
            for before, after in itertools.pairwise(record.times_s)
            if after > self.struck_s
        )
        return max(waits, default=0.0)


def requests(num: int, num_tokens: int = NUM_TOKENS) -> list[GenerationRequest]:
    """Returns requests whose texts differ."""
    return [asking(seed=100 + number, num_tokens=num_tokens) for number in range(num)]


async def strike_streams(
    client: OutriderClient, num: int, strike: Callable[[], Awaitable[object]], *, after: int = 30
) -> Streams:
    """Runs streams, and strikes once each has some tokens; all of them must end with plain decoding's text.

    Args:
        client: of the orchestrators.
        num: of streams.
        strike: does it.
        after: tokens of each stream before that.
    """
    asked, streams = requests(num), Streams()
    await learn(client, *asked)
    reached = [asyncio.Event() for _ in asked]

    async def when_all_run() -> None:
        await asyncio.gather(*(event.wait() for event in reached))
        streams.struck_s = time.monotonic()
        await strike()

    striking = asyncio.create_task(when_all_run())
    try:
        streams.records = await asyncio.gather(
            *(
                watch(client, request, after=after, strike=event.set, timeout_s=_REQUEST_S)
                for request, event in zip(asked, reached, strict=True)
            )
        )
        await striking
    finally:
        striking.cancel()
    await verify(client, streams.records)
    return streams


async def stream_during(client: OutriderClient, num: int, work: Awaitable[object]) -> Streams:
    """Keeps this many streams running for as long as something is done; see `strike_streams`."""
    asked, streams = requests(num), Streams()
    await learn(client, *asked)
    working = asyncio.ensure_future(work)

    async def keep_asking(request: GenerationRequest) -> None:
        while not working.done():
            # With the same id it would be replayed from the store, without a worker.
            record = await watch(client, replace(request, request_id=""), timeout_s=_REQUEST_S)
            streams.records.append(record)
            if record.error is None:
                # A session that no client named is kept for five minutes.
                await read_log(client, record)

    streams.struck_s = time.monotonic()
    await asyncio.gather(*(keep_asking(request) for request in asked))
    await working
    await verify(client, streams.records)
    return streams


async def verify(client: OutriderClient, records: Sequence[Record]) -> None:
    """Compares each stream and its log with plain decoding's text: nothing is lost, doubled or changed."""
    failed = [str(record.error) for record in records if record.error is not None]
    assert not failed, f"failed_requests {len(failed)}: {failed[:3]}"
    for record in records:
        if record.log is None:
            await read_log(client, record)
    check(records, plain)
