"""What the forms of chat completions and completions share: choices in one piece, and streams of chunks."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from orchestrator.http.errors import encoded
from orchestrator.http.forms import DONE, Choice, Form, notice_of, report_of
from orchestrator.http.logprobs import TokenTexts
from outrider.v1 import generation_pb2, tokens_pb2


class ChunkedForm(Form):
    """A form whose streams are chunks with choices. A route has a subclass.

    Args:
        response_id: see `Form`.
        model: see `Form`.
        num_choices: see `Form`.
        num_per_prompt: see `Form`.
        texts: of tokens, for log-probabilities.
        with_logprobs: whether choices have log-probabilities.
        with_usage: whether a stream ends with the usage.
        with_usage_so_far: whether each chunk has the usage of its choice so far.

    Attributes:
        whole_object: the key `object` of a response in one piece.
        chunk_object: the key `object` of a chunk.
        texts: of tokens.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        response_id: str,
        model: str,
        num_choices: int,
        num_per_prompt: int,
        texts: TokenTexts,
        *,
        with_logprobs: bool,
        with_usage: bool,
        with_usage_so_far: bool,
    ) -> None:
        super().__init__(response_id, model, num_choices, num_per_prompt)
        self.texts = texts
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._with_usage_so_far = with_usage_so_far
        self._head = b""

    # What subclasses write.

    @abstractmethod
    def first(self, choice: Choice) -> Mapping[str, Any] | None:
        """Return what a choice's first chunk has, ahead of its output; None for no chunk."""

    @abstractmethod
    def output(self, choice: Choice, text: str, parts: Sequence[generation_pb2.OutputPart] = ()) -> Mapping[str, Any]:
        """Return what a choice's chunk has for new text, and for new parts where the request has any."""

    @abstractmethod
    def has_output(self, output: Mapping[str, Any]) -> bool:
        """Return whether what a chunk has shows anything."""

    @abstractmethod
    def answer(self, choice: Choice) -> Mapping[str, Any]:
        """Return what a choice in one piece has for its text."""

    @abstractmethod
    def logprobs(
        self, choice: Choice, token_ids: Sequence[int], known: Sequence[tokens_pb2.TokenLogprobs]
    ) -> dict[str, Any]:
        """Return the log-probabilities of a choice's next tokens."""

    # What they share.

    def begin(self, *, is_resumed: bool) -> bytes:
        """Return the first chunk of each choice; a client that resumes has them."""
        # What all chunks share is written once: a stream has one for each few tokens.
        self._head = json.dumps(self._common(self.chunk_object), separators=(",", ":"))[:-1].encode()
        if is_resumed:
            return b""
        firsts = [(choice, self.first(choice)) for choice in self.choices]
        return b"".join(self._chunk(choice, first) for choice, first in firsts if first is not None)

    def delta(self, choice: Choice, delta: generation_pb2.Delta) -> bytes:
        """Return the chunk with new text."""
        report = report_of(delta) if delta.HasField("statistics") else None
        logprobs = self.logprobs(choice, delta.token_ids, delta.logprobs) if self._with_logprobs else None
        output = self.output(choice, delta.text, delta.parts)
        if report is None and logprobs is None and not self.has_output(output):
            return b""
        return self._chunk(choice, output, logprobs=logprobs, report=report)

    def notice(self, choice: Choice, notice: generation_pb2.Notice) -> bytes:
        """Return a chunk without text."""
        return self._chunk(choice, self.output(choice, ""), report=notice_of(notice))

    def finish_reason(self, choice: Choice) -> str | None:
        """Return why a choice ended: with calls of tools, or else."""
        return "tool_calls" if choice.has_calls and choice.finish_reason == "stop" else choice.finish_reason

    def finish(self, choice: Choice, finished: generation_pb2.Finished) -> bytes:
        """Return the chunk with the rest of the output and the reason of the end.

        They come together: the rest has no token of its own, so a client could not say that it has the one without the
        other.
        """
        output = self.output(choice, finished.text, finished.parts)
        return self._chunk(choice, output, finish_reason=self.finish_reason(choice))

    def end(self) -> bytes:
        """Return the usage where it was requested, then the end of the stream."""
        if not self._with_usage:
            return DONE
        return self._event({"choices": [], "usage": self.usage(), "metrics": self.metrics()}) + DONE

    def whole(self) -> dict[str, Any]:
        """Return the completion in one piece."""
        choices = [
            {
                "index": choice.index,
                **self.answer(choice),
                "logprobs": self.logprobs(choice, choice.token_ids, choice.logprobs) if self._with_logprobs else None,
                "finish_reason": self.finish_reason(choice),
            }
            for choice in self.choices
        ]
        common = self._common(self.whole_object)
        return {**common, "choices": choices, "usage": self.usage(), "metrics": self.metrics()}

    def _common(self, name: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": name, "created": self.created, "model": self.model}

    def _chunk(
        self,
        choice: Choice,
        output: Mapping[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        report: dict[str, Any] | None = None,
    ) -> bytes:
        content = {"index": choice.index, **output, "logprobs": logprobs, "finish_reason": finish_reason}
        more: dict[str, Any] = {} if report is None else {"speculation": report}
        if self._with_usage_so_far:
            more["usage"] = self._usage_so_far(choice)
        return self._event({"choices": [content], **more})

    def _usage_so_far(self, choice: Choice) -> dict[str, Any]:
        """Return the tokens of a choice, and of its prompt, under vLLM's names."""
        accepted = choice.accepted
        num_prompt = accepted.session_len + accepted.num_prompt_tokens if accepted is not None else 0
        num_output = choice.finished.num_output_tokens if choice.finished is not None else choice.offset
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def _event(self, content: dict[str, Any]) -> bytes:
        return b"%sdata: %s,%s\n\n" % (self.position, self._head, encoded(content)[1:])
