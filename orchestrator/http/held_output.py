"""The part of an output that the client of a resumed stream has: that of its first tokens."""

from collections.abc import Sequence

from orchestrator.api.service import GenerationService
from orchestrator.generation.parts import PartWriter
from orchestrator.text.output import OutputText
from orchestrator.text.output_parts import OutputParts
from orchestrator.text.parts import CallPiece, Content, Part, merged
from orchestrator.text.reasoning import MAX_PROMPT_TOKENS
from orchestrator.workers.model import Model
from outrider.errors import InvalidArgument
from outrider.serving.interceptor import Metadata
from outrider.v1 import generation_pb2

Parts = Sequence[generation_pb2.OutputPart]


class HeldOutput:
    """The parts that the client has.

    Args:
        num_tokens: tokens that it has.
        output: of the whole request, from its start.
        writer: of the request's parts.
        is_parsed: whether the output is taken apart; else its text is content.
    """

    def __init__(self, num_tokens: int, output: OutputText, writer: PartWriter, *, is_parsed: bool) -> None:
        self.num_tokens = num_tokens
        self._output = output
        self._writer = writer
        self._is_parsed = is_parsed
        self._num_left = num_tokens

    def split(self, token_ids: Sequence[int], parts: Parts) -> tuple[list[Parts], Parts]:
        """Return the parts of the next tokens that the client has, token by token, and those that it lacks."""
        held = token_ids[: self._num_left]
        self._num_left -= len(held)
        known = [self._absorb(token_id) for token_id in held]
        whole = merged(part for token in known for part in token)
        return [self._writer.messages(token) for token in known], _behind(parts, whole)

    def check(self) -> None:
        """Raise `InvalidArgument` where the whole output has fewer tokens than the client claims to have."""
        if self._num_left:
            num = self.num_tokens - self._num_left
            problem = f"Last-Event-ID has offset {self.num_tokens}, the output has {num} tokens"
            raise InvalidArgument(problem, "Last-Event-ID")

    def _absorb(self, token_id: int) -> Sequence[Part]:
        absorbed = self._output.absorb([token_id])
        return absorbed.parts if self._is_parsed else merged([Content(absorbed.text)])


async def held_output(
    message: generation_pb2.GenerateRequest, model: Model, service: GenerationService, call: Metadata
) -> HeldOutput | None:
    """Return the measure of what the client has of a stream that it resumes; None for a new one.

    The message is made to replay the output from its start.

    Args:
        message: the request.
        model: its model.
        service: has the request's prompt, the end of which may begin the output.
        call: metadata of the HTTP request.

    Raises:
        OutriderError: a parameter is wrong, or the session cannot be read.
    """
    if not message.resume_offset:
        return None
    num_tokens, message.resume_offset = message.resume_offset, 0
    parameters, parsing = model.parameters(message.parameters, seed=0), await service.parsing(message)
    parts = None
    if parsing is not None and model.tokenizer is not None:
        prompt = await service.prompt_end(message, call, MAX_PROMPT_TOKENS)
        parts = OutputParts(model.tokenizer, parsing, prompt, model.stop_token_ids(parameters))
    output = OutputText(model.tokenizer, parameters, parts)
    return HeldOutput(num_tokens, output, PartWriter(message.request_id), is_parsed=parts is not None)


def _behind(parts: Parts, known: Sequence[Part]) -> Parts:
    """Return the parts behind those that are known; the last of these may be the beginning of one."""
    if not known:
        return parts
    last, rest = known[-1], list(parts[len(known) :])
    cut = generation_pb2.OutputPart()
    cut.CopyFrom(parts[len(known) - 1])
    match last:
        case CallPiece():
            cut.tool_call.id = cut.tool_call.name = ""
            cut.tool_call.arguments = cut.tool_call.arguments[len(last.arguments) :]
            return [cut, *rest] if cut.tool_call.arguments else rest
        case Content():
            cut.content = cut.content[len(last.text) :]
            return [cut, *rest] if cut.content else rest
    cut.reasoning = cut.reasoning[len(last.text) :]
    return [cut, *rest] if cut.reasoning else rest
