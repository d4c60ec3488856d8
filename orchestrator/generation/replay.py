"""The events of a request that are made of its record and its log: nothing of them depends on a worker."""

from orchestrator.store.sessions import SessionRecord
from orchestrator.text.output import OutputText
from outrider import wire
from outrider.v1 import generation_pb2


def accepted(record: SessionRecord) -> generation_pb2.GenerateResponse:
    """Returns the first event of a stream."""
    return generation_pb2.GenerateResponse(
        accepted=generation_pb2.Accepted(
            request_id=record.request_id,
            session_id=record.session_id,
            seed=record.parameters.seed or 0,
            num_prompt_tokens=record.prompt_len - record.prompt_start,
            session_len=record.prompt_start,
        )
    )


def replayed(
    output: OutputText, token_ids: list[int], offset: int
) -> tuple[bool, generation_pb2.GenerateResponse | None]:
    """Absorbs committed output; returns whether a stop string ended it, and what the client does not have yet."""
    stopped = output.absorb(token_ids[:offset]).stopped
    rest = output.absorb(token_ids[offset:])
    if offset == len(token_ids):
        return stopped, None
    delta = generation_pb2.Delta(offset=offset, token_ids=token_ids[offset:], text=rest.text)
    return stopped or rest.stopped, generation_pb2.GenerateResponse(delta=delta)


def ended(record: SessionRecord, text: str) -> generation_pb2.GenerateResponse:
    """Returns the terminal event of a request that had finished before; `text` became certain with its end."""
    return generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(
            finish_reason=wire.finish_to_number(record.finish_reason),
            num_output_tokens=record.committed_len - record.prompt_len,
            text=text,
            statistics=generation_pb2.GenerationStatistics(),
        )
    )
