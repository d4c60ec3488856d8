"""The generation of one request, from its lease to its terminal event; docs/architecture.md describes the flow.

One coroutine (`Generation.events`) takes the verdicts that have arrived, commits their tokens together, and only then
emits them.
"""

import asyncio
from collections.abc import AsyncGenerator

from google.protobuf.timestamp_pb2 import Timestamp

from orchestrator.generation.batch import Batch
from orchestrator.generation.lease import HeldLease
from orchestrator.generation.parts import PartWriter
from orchestrator.generation.request import RunningRequest, Services
from orchestrator.generation.worker_pair import WorkerPair
from orchestrator.metrics import RequestStatistics
from orchestrator.store.record import SessionRecord
from orchestrator.text.output import Ending, OutputText
from orchestrator.text.parts import merged
from outrider import wire
from outrider.errors import OutriderError
from outrider.v1 import generation_pb2, target_pb2


class Generation:
    """A request that is generated under its lease.

    Args:
        services: store, workers, settings, metrics.
        request: the request.
        output: the output's text, which has absorbed the committed tokens.
    """

    def __init__(self, services: Services, request: RunningRequest, output: OutputText) -> None:
        self._record = request.record
        self._reports = request.reports
        self._prediction = request.prediction
        self._output = output
        self._parts = PartWriter(request.record.request_id)
        self._statistics = RequestStatistics(services.metrics, request.record.rule)
        self._workers = WorkerPair(services, request, self._statistics)
        self._lease = HeldLease(services, request, self._statistics, self.cancel, self._on_lease_lost)
        self._lease_error: OutriderError | None = None
        self._is_finished = False

    async def events(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield deltas, then the terminal event.

        Raises:
            Fenced: a newer lease continues the session.
            Unavailable: Redis or every target is out of reach; the session is resumable.
            OutriderError: any other error that ends the stream; the session is resumable.
        """
        self._lease.start()
        while not self._is_finished:
            for notice in self._workers.take_notices():
                if self._reports:
                    yield generation_pb2.GenerateResponse(notice=notice)
            verdicts = await self._next_verdicts()
            if not verdicts:
                continue
            batch = self._absorb(verdicts)
            batch.finish_reason = await self._lease.commit(batch.token_ids, batch.finish_reason, self._workers.replica)
            if batch.finish_reason is None:
                self._workers.move_window(self._lease.committed_len)
            if batch.token_ids:
                yield self._delta(batch)
            if batch.finish_reason is not None:
                self._is_finished = True
                yield self._finished(batch)

    @property
    def request_id(self) -> str:
        """The request."""
        return self._record.request_id

    def cancel(self) -> None:
        """End the request after the verdicts that have arrived; its stream gets the terminal event."""
        self._workers.cancel()

    def close(self) -> "asyncio.Task[None] | None":
        """Close the sessions on both workers; return the task that releases a lease still held, if any."""
        self._lease.stop()
        self._workers.close(self._lease.committed_len)
        return None if self._is_finished else asyncio.create_task(self._lease.release())

    def _on_lease_lost(self, error: OutriderError) -> None:
        self._lease_error = error
        self._workers.arrived.set()

    async def _next_verdicts(self) -> list[target_pb2.Verdict]:
        """Return the verdicts that have arrived; else attach workers, wait, and return none."""
        if self._lease_error is not None:
            raise self._lease_error
        if verdicts := self._workers.take_verdicts():
            return verdicts
        await self._workers.attach(self._lease.committed_len)
        if self._lease_error is None:
            await self._workers.wait()
        return []

    def _absorb(self, verdicts: list[target_pb2.Verdict]) -> Batch:
        batch, draft_is_ready = Batch(), self._workers.draft_is_ready
        for verdict in verdicts:
            absorbed = self._output.absorb(verdict.token_ids)
            batch.add(verdict, absorbed)
            num = absorbed.num_tokens
            if self._prediction is not None:
                self._prediction.follow(verdict.token_ids[:num])
            if num:
                self._statistics.record_verdict(verdict, num)
            if num and draft_is_ready and verdict.num_nodes == 0:
                self._statistics.record_fallback("no_proposal")
            if batch.finish_reason is not None:
                break
        return batch

    def _delta(self, batch: Batch) -> generation_pb2.GenerateResponse:
        offset = self._lease.committed_len - len(batch.token_ids) - self._record.prompt_len
        return generation_pb2.GenerateResponse(
            delta=generation_pb2.Delta(
                offset=offset,
                token_ids=batch.token_ids,
                text=batch.text,
                origins=batch.origins,
                drafters=batch.known_drafters,
                logprobs=batch.logprobs,
                statistics=self._statistics.message() if self._reports else None,
                texts=batch.texts if self._reports else None,
                parts=self._parts.messages(merged(batch.parts)),
            )
        )

    def _finished(self, batch: Batch) -> generation_pb2.GenerateResponse:
        ending = self._output.finish(stopped=batch.stopped)
        return generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                finish_reason=wire.finish_to_number(batch.finish_reason),
                num_output_tokens=self._lease.committed_len - self._record.prompt_len,
                text=ending.text,
                statistics=self._final_statistics(),
                parts=self._parts.messages(ending.parts),
                num_tool_calls=ending.num_calls,
                num_reasoning_tokens=ending.num_reasoning_tokens,
            )
        )

    def _final_statistics(self) -> generation_pb2.GenerationStatistics:
        statistics = self._statistics.message()
        if self._prediction is not None:
            statistics.num_prediction_tokens = len(self._prediction.token_ids)
            statistics.num_accepted_prediction_tokens = self._prediction.num_accepted
        return statistics


def accepted_event(record: SessionRecord) -> generation_pb2.GenerateResponse:
    """Return the first event of a stream."""
    return generation_pb2.GenerateResponse(
        accepted=generation_pb2.Accepted(
            request_id=record.request_id,
            session_id=record.session_id,
            seed=record.parameters.seed or 0,
            num_prompt_tokens=record.prompt_len - record.prompt_start,
            session_len=record.prompt_start,
            create_time=Timestamp(seconds=record.begun // 10**6, nanos=record.begun % 10**6 * 1000),
        )
    )


def replayed_event(
    output: OutputText, token_ids: list[int], offset: int, parts: PartWriter
) -> tuple[bool, generation_pb2.GenerateResponse | None]:
    """Absorb committed output; return whether a stop string ended it, and the delta that the client lacks, if any."""
    stopped = output.absorb(token_ids[:offset]).stopped
    rest = output.absorb(token_ids[offset:])
    if offset == len(token_ids):
        return stopped, None
    delta = generation_pb2.Delta(
        offset=offset, token_ids=token_ids[offset:], text=rest.text, parts=parts.messages(rest.parts)
    )
    return stopped or rest.stopped, generation_pb2.GenerateResponse(delta=delta)


def finished_event(record: SessionRecord, ending: Ending, parts: PartWriter) -> generation_pb2.GenerateResponse:
    """Return the terminal event of a request that had finished before, with what became certain with its end."""
    return generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(
            finish_reason=wire.finish_to_number(record.finish_reason),
            num_output_tokens=record.committed_len - record.prompt_len,
            text=ending.text,
            statistics=generation_pb2.GenerationStatistics(),
            parts=parts.messages(ending.parts),
            num_tool_calls=ending.num_calls,
            num_reasoning_tokens=ending.num_reasoning_tokens,
        )
    )
