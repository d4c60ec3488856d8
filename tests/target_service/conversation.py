"""A caller of TargetService over a real socket, as the orchestrator is one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from outrider import wire
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.markov import MarkovModel
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving.interceptor import CallInterceptor, CallsInFlight
from outrider.tokens import Base, ProposalNode
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc, tokens_pb2
from target_service.engine.colocated import ColocatedDraft
from target_service.engine.engine import Engine
from target_service.frontend import Frontend
from target_service.own_engine import grammar_compiler, remote_blocks
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings

MODEL = "markov:vocabulary=12,order=2,seed=3,eos=11"


class Caller:
    """One Verify stream; frames that come back wait in a queue for each handle."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        self._queues: dict[int, asyncio.Queue[pb.VerifyResponseFrame]] = {}
        self._writing = asyncio.Lock()
        self.progress: dict[int, list[int]] = {}
        self.position_bytes = 0
        """Of features, which whoever asks for them knows."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            for frame in message.frames:
                if frame.WhichOneof("frame") == "progress":
                    # As many as passes a prompt took, which is not what most tests are about.
                    self.progress.setdefault(frame.handle, []).append(frame.progress.cached_len)
                    continue
                self._queues.setdefault(frame.handle, asyncio.Queue()).put_nowait(frame)

    async def send(self, handle: int, **content: object) -> None:
        async with self._writing:
            await self._call.write(pb.VerifyRequest(frames=[pb.VerifyRequestFrame(handle=handle, **content)]))

    async def features(self, handle: int, end: int) -> bytes:
        """Returns the features that come until those of a position are there; they must be contiguous from 0 on."""
        data, position_bytes = b"", 0
        while not position_bytes or len(data) < end * position_bytes:
            frame = await self.receive(handle)
            if frame.WhichOneof("frame") != "features":
                continue
            position_bytes = self.position_bytes
            assert frame.features.start * position_bytes == len(data)
            data += frame.features.data
        return data

    async def receive(self, handle: int) -> pb.VerifyResponseFrame:
        queue = self._queues.setdefault(handle, asyncio.Queue())
        return await asyncio.wait_for(queue.get(), 20)

    def num_waiting(self, handle: int) -> int:
        """Returns how many frames have come that nobody has taken."""
        return self._queues[handle].qsize()

    async def open(
        self,
        handle: int,
        prompt: Sequence[int],
        parameters: SamplingParameters,
        *,
        session: str = "",
        fencing_token: int = 1,
        rule: AcceptanceRule = AcceptanceRule.COUPLED,
        num_speculative_tokens: int = 0,
        max_wait_s: float = 5.0,
        window: int = 10_000,
        prompt_len: int | None = None,
        stop_token_ids: Sequence[int] = (11,),
        cache_salt: bytes = b"",
        lookahead: int = 0,
        own_draft: bool = False,
        forced_tokens: bool = False,
    ) -> pb.VerifyResponseFrame:
        message = pb.VerifyOpen(
            session_id=session or f"session-{handle}",
            fencing_token=fencing_token,
            parameters=wire.parameters_to_message(parameters),
            acceptance_rule=wire.rule_to_number(rule),
            prompt_len=len(prompt) if prompt_len is None else prompt_len,
            committed_len=len(prompt),
            stop_token_ids=stop_token_ids,
            window_end=len(prompt) + window,
            speculation=pb.SpeculationSettings(
                num_speculative_tokens=num_speculative_tokens,
                max_wait_s=max_wait_s,
                lookahead=lookahead,
                own_draft=own_draft,
                forced_tokens=forced_tokens,
            ),
            cache_salt=cache_salt,
        )
        await self.send(handle, open=message)
        return await self.receive(handle)

    async def span(self, handle: int, start: int, token_ids: Sequence[int]) -> None:
        await self.send(handle, span=tokens_pb2.TokenSpan(start=start, token_ids=token_ids))

    async def propose(self, handle: int, base: Base, nodes: Sequence[ProposalNode], *, complete: bool = True) -> None:
        proposal = tokens_pb2.Proposal(
            base=wire.base_to_message(base),
            first_node=1,
            nodes=[wire.node_to_message(node) for node in nodes],
            complete=complete,
        )
        await self.send(handle, proposal=proposal)

    async def verdicts(self, handle: int) -> AsyncIterator[pb.Verdict]:
        """Yields verdicts until the request has ended."""
        while True:
            frame = await self.receive(handle)
            assert frame.WhichOneof("frame") == "verdict", frame
            yield frame.verdict
            if frame.verdict.finish_reason:
                return

    async def plain(
        self, handle: int, prompt: Sequence[int], parameters: SamplingParameters, **more: object
    ) -> list[int]:
        """Returns the output of plain decoding, closing the request."""
        opened = await self.open(handle, prompt, parameters, **more)  # type: ignore[arg-type]
        await self.span(handle, opened.opened.cached_len, prompt[opened.opened.cached_len :])
        output = [token_id async for verdict in self.verdicts(handle) for token_id in verdict.token_ids]
        await self.send(handle, close=pb.VerifyClose(committed_len=len(prompt) + len(output)))
        return output

    async def end(self) -> None:
        await self._call.done_writing()
        await self._reader

    async def ended(self) -> None:
        """Waits until the target ends the stream, and raises its error."""
        await asyncio.wait_for(self._reader, 20)


def model(kv_budget_bytes: int = 1 << 20) -> MarkovModel:
    loaded = load_model(MODEL, LoadOptions(kv_budget_bytes=kv_budget_bytes)).model
    assert isinstance(loaded, MarkovModel)
    return loaded


@asynccontextmanager
async def target(
    folder: str = "", *, draft: ColocatedDraft | None = None, **settings: object
) -> AsyncIterator[tuple[Engine, Caller]]:
    """Serves a target in this process, a model in a folder or the Markov model, and connects to it.

    The engine's frontend is its `host`.
    """
    chosen = TargetSettings(**settings)  # type: ignore[arg-type]
    budget = chosen.kv_budget_bytes
    loaded = load_model(folder or MODEL, LoadOptions(kv_budget_bytes=budget))
    blocks = remote_blocks(loaded.model, chosen)
    compiler = grammar_compiler(loaded)
    engine = Engine(loaded.model, chosen, blocks, draft, compiler)
    frontend = Frontend(engine, chosen.max_sessions)
    frontend.start()
    server = grpc.aio.server(interceptors=[CallInterceptor(CallsInFlight())])
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(frontend, engine.max_len), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        caller = Caller(channel)
        yield engine, caller
        await caller.end()
    await server.stop(0)
    frontend.loop.stop()
    if compiler is not None:
        compiler.close()
    if blocks is not None:
        blocks.close(5)


@asynccontextmanager
async def paused(engine: Engine) -> AsyncIterator[None]:
    """Keeps the engine's thread from applying any command that comes meanwhile."""
    is_paused, goes_on = threading.Event(), threading.Event()

    def pause() -> None:
        is_paused.set()
        goes_on.wait(20)

    engine.host.run_in_engine(pause)
    try:
        # Until then the thread may take this call and the commands behind it at once.
        assert await asyncio.to_thread(is_paused.wait, 20)
        yield
    finally:
        goes_on.set()
