"""Many clients while processes are killed and stopped and links are cut at random: `make chaos`.

Every request must end, with plain decoding's text, no token missing and none twice; no two leases on a session at once.
The seed decides what is struck and when, and which client asks for what.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.client import GenerationRequest
from outrider.errors import OutriderError
from outrider.local.process import ServiceProcess
from tests.faults.history import HistoryError, Record, check, monitored, read_log, watch
from tests.faults.scene import Scene, asking, load_of, plain
from tests.faults.stack import FaultOptions, FaultStack, fault_stack, resume, stop

_REQUEST_S = 120.0
_NUM_TEXTS = 40
_HEALED_S = 180.0
_MARKOV = FaultOptions(
    num_targets=2,
    num_drafts=2,
    num_orchestrators=3,
    # A pass over a hundred sessions takes a while; what is slow is not what is gone.
    orchestrator_environment={"OUTRIDER_REDIS_TIMEOUT_S": "2", "OUTRIDER_LEASE_S": "5"},
)
_EMBEDDED = replace(
    _MARKOV,
    target="embedded",
    draft="embedded",
    drafter="eagle3",
    num_drafts=1,
    keeps_kv_blocks=True,
    # A target that takes a session over restores what there is, also where computing would be as fast.
    target_environment={"OUTRIDER_KV_BLOCKS": "always"},
)


@dataclass
class Tally:
    """What came of a run.

    Attributes:
        num_passed: requests that ended as they must.
        problems: what went wrong, of the others.
        num_tokens: that clients were given.
        faults: how many of each kind.
        gaps_s: longest gap of each stream.
        num_restored: KV blocks that targets which live at the end took from Redis.
        kept: some records, whose logs are compared at the end.
    """

    num_passed: int = 0
    problems: list[str] = field(default_factory=list)
    num_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    num_restored: int = 0
    kept: list[Record] = field(default_factory=list)


class Chaos:
    """One run.

    Args:
        stack: what is struck.
        rng: decides.
        minutes: length.
        every_s: mean time between faults.
        prompt_len: tokens of each prompt.
        num_tokens: of each request.
        kills_only: whether processes are killed, and nothing else is done.
    """

    def __init__(
        self,
        stack: FaultStack,
        rng: random.Random,
        minutes: float,
        every_s: float,
        prompt_len: int,
        num_tokens: int,
        *,
        kills_only: bool = False,
    ) -> None:
        self.stack = stack
        self.tally = Tally()
        self._rng = rng
        self._minutes = minutes
        self._ends_s = 0.0
        self._every_s = every_s
        self._prompt_len = prompt_len
        self._num_tokens = num_tokens
        self._kills_only = kills_only
        self._strikes: list[asyncio.Task[None]] = []
        self._struck: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, num_clients: int) -> Tally:
        """Runs clients and faults; returns when all requests have ended and all logs are compared."""
        texts = [self._text(1000 + number) for number in range(_NUM_TEXTS)]
        async with self.stack.client() as client:
            scene = Scene(self.stack, client, lambda name, value: None)
            for start in range(0, len(texts), 8):
                await scene.learn(*texts[start : start + 8])
            self._ends_s = time.monotonic() + 60 * self._minutes
            seeds = [self._rng.random() for _ in range(num_clients)]
            striking = asyncio.create_task(self._strike())
            clients = [asyncio.create_task(self._ask(random.Random(seed), texts)) for seed in seeds]
            showing = asyncio.create_task(self._show())
            await striking
            await asyncio.wait_for(asyncio.gather(*self._strikes), _HEALED_S)
            await self.stack.heal()
            await asyncio.wait(clients, timeout=2 * _REQUEST_S)
            showing.cancel()
            for task in clients:
                if not task.done():
                    self.tally.problems.append("a request did not end")
                    task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            for record in self.tally.kept:
                await read_log(client, record)
            self._compare(self.tally.kept, counts=False)
        for target in self.stack.targets:
            self.tally.num_restored += (await load_of(target)).kv_blocks.num_restored
        return self.tally

    def _text(self, seed: int) -> GenerationRequest:
        # Prompts differ, so that no session finds its KV cache with another one.
        prompt = tuple(random.Random(seed).choices(range(1, 16), k=self._prompt_len))
        return replace(asking(seed, self._num_tokens), token_ids=prompt)

    async def _ask(self, rng: random.Random, texts: list[GenerationRequest]) -> None:
        addresses = [proxy.address for proxy in self.stack.to_orchestrators]
        rng.shuffle(addresses)
        async with self.stack.client(*addresses, max_attempts=200) as client:
            while time.monotonic() < self._ends_s:
                request = replace(rng.choice(texts), request_id=uuid.uuid4().hex)
                record = await watch(client, request, timeout_s=_REQUEST_S)
                self._compare([record], counts=True)
                if len(self.tally.kept) < 2000:
                    self.tally.kept.append(record)

    def _compare(self, records: list[Record], *, counts: bool) -> None:
        for record in records:
            try:
                check([record], plain)
                if record.error is not None:
                    raise HistoryError(f"ended with {record.error.reason}: {record.error.message}")
            except HistoryError as error:
                self.tally.problems.append(str(error))
                continue
            if counts:
                self.tally.num_passed += 1
                self.tally.num_tokens += len(record.token_ids)
                self.tally.gaps_s.append(record.longest_gap_s)

    async def _strike(self) -> None:
        while True:
            wait_s = self._rng.uniform(0.5, 1.5) * self._every_s
            if time.monotonic() + wait_s > self._ends_s:
                return
            await asyncio.sleep(wait_s)
            kinds: dict[str, Callable[[], Awaitable[None]]] = {"kill": self._kill}
            if not self._kills_only:
                kinds |= {"stop": self._stop, "cut": self._cut, "reset": self._reset, "redis": self._restart_redis}
            name = self._rng.choices(list(kinds), [4, 3, 3, 2, 1][: len(kinds)])[0]
            self.tally.faults[name] += 1
            # The next one does not wait until this one is over.
            self._strikes.append(asyncio.create_task(kinds[name]()))

    async def _kill(self) -> None:
        pause_s = self._rng.uniform(0.0, 2.0)
        async with self._victim() as process:
            process.kill()
            await asyncio.sleep(pause_s)
            process.restart()
            await process.wait_ready(120)

    async def _stop(self) -> None:
        pause_s = self._rng.uniform(0.5, 6.0)
        async with self._victim() as process:
            stop(process)
            await asyncio.sleep(pause_s)
            resume(process)

    @asynccontextmanager
    async def _victim(self) -> AsyncIterator[ServiceProcess]:
        """Any process; where another fault has it, once that is over."""
        process = self._rng.choice(self.stack.processes)
        async with self._struck[process.spec.name]:
            yield process

    async def _cut(self) -> None:
        proxy = self._rng.choice(self.stack.proxies)
        up, down = self._rng.choice([(True, False), (False, True), (True, True)])
        pause_s = self._rng.uniform(0.2, 4.0)
        await proxy.set_blackhole(up=up, down=down)
        await asyncio.sleep(pause_s)
        await proxy.set_blackhole(up=False, down=False)

    async def _reset(self) -> None:
        self._rng.choice(self.stack.proxies).reset_after(self._rng.randrange(1, 2000))

    async def _restart_redis(self) -> None:
        async with self._struck["redis"]:
            await asyncio.to_thread(self.stack.redis.stop)
            await asyncio.to_thread(self.stack.redis.start)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(10)
            left_s = max(0.0, self._ends_s - time.monotonic())
            done, faults = self.tally.num_passed, sum(self.tally.faults.values())
            problems = len(self.tally.problems)
            print(f"{left_s:4.0f} s left: {done} requests, {faults} faults, {problems} problems", flush=True)


async def run(arguments: argparse.Namespace) -> int:
    """Runs chaos; returns the number of problems."""
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    options = _EMBEDDED if arguments.embedded else _MARKOV
    folder = Path(tempfile.mkdtemp(prefix="outrider-chaos-"))
    async with fault_stack(folder, options) as stack, monitored(stack.redis.url) as commits:
        chaos = Chaos(
            stack,
            random.Random(seed),
            arguments.minutes,
            arguments.every,
            arguments.prompt_len,
            arguments.tokens,
            kills_only=arguments.embedded,
        )
        tally = await chaos.run(arguments.clients)
    try:
        commits.check()
    except HistoryError as error:
        tally.problems.append(str(error))
    if tally.problems:
        print(f"logs of all processes are in {folder}")
    else:
        shutil.rmtree(folder)
    gaps = sorted(tally.gaps_s) or [0.0]
    print(f"faults: {dict(tally.faults)}; {commits.num_appends} commits, {tally.num_tokens} tokens")
    if options.keeps_kv_blocks:
        print(f"{tally.num_restored} KV blocks restored")
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, 99 % {gaps[int(0.99 * len(gaps))]:.2f} s")
    for problem, number in Counter(tally.problems).most_common(10):
        print(f"{number} x {problem}")
    print(f"{tally.num_passed} passed, {len(tally.problems)} failed")
    return len(tally.problems)


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the run")
    parser.add_argument("--clients", type=int, default=200, help="clients at once")
    parser.add_argument("--every", type=float, default=10.0, help="mean seconds between faults")
    parser.add_argument("--prompt-len", type=int, default=3, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of a request")
    parser.add_argument("--seed", type=int, help="of an earlier run, to have it again")
    parser.add_argument("--embedded", action="store_true", help="the embedded model and its draft; kills only")
    try:
        sys.exit(1 if asyncio.run(run(parser.parse_args())) else 0)
    except OutriderError as error:
        sys.exit(f"{error.reason}: {error.message}")


if __name__ == "__main__":
    main()
