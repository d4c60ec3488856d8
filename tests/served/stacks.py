"""Whole stacks for the tests: real processes, a real Redis-protocol server, real sockets."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outrider.client import DraftOptions, LocalStack, OutriderClient, StackOptions
from outrider.local.process import ProcessSpec
from outrider.v1 import worker_pb2

TARGET = "markov:vocabulary=5,order=2,seed=11,scale=1.2"
GOOD_DRAFT = f"{TARGET},noise=0.3"
BAD_DRAFT = f"{TARGET},noise=1.0,noise_seed=77"

# The stack that tests share. A pass takes a little, so that a short request is not over before its draft is open.
EOS = 3
SHARED_TARGET = f"markov:vocabulary=16,order=1,seed=21,scale=1.5,eos={EOS},step_s=0.003"
SHARED_DRAFT = f"{SHARED_TARGET},noise=0.2"
OTHER_TOKENIZER = "markov:vocabulary=7"


def markov_stack(draft: str | None = GOOD_DRAFT, **more: object) -> StackOptions:
    """Returns a stack with Markov models, whose target waits for every proposal, so that all of them are verified."""
    drafts = () if draft is None else (DraftOptions(drafter="model", model=draft),)
    return StackOptions(
        model=TARGET,
        drafts=drafts,
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "5"},
        **more,  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class WrongStackOptions(StackOptions):
    """A stack whose target decides by a wrong rule; see `wrong_target`."""

    def target_specs(self, kv_blocks_url: str = "") -> Iterator[ProcessSpec]:
        """Yields the targets, started from another module."""
        for spec in super(WrongStackOptions, self).target_specs(kv_blocks_url):
            yield replace(spec, module="tests.served.wrong_target")


async def until_one_draft_is_in_rotation(client: OutriderClient) -> None:
    """Returns once an orchestrator has a draft in rotation."""
    async with asyncio.timeout(30):
        while not any(
            worker.in_rotation and worker.info.role == worker_pb2.WORKER_ROLE_DRAFT
            for worker in (await client.list_models()).workers
        ):
            await asyncio.sleep(0.05)


async def until_all_in_rotation(stack: LocalStack) -> None:
    """Returns once every orchestrator has all workers in rotation."""
    for orchestrator in stack.orchestrators:
        async with OutriderClient((orchestrator.address,)) as client, asyncio.timeout(30):
            while not all(worker.in_rotation for worker in (await client.list_models()).workers):
                await asyncio.sleep(0.05)
