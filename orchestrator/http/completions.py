"""POST /v1/completions."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestrator.http.bodies import CompletionBody
from orchestrator.http.chunks import ChunkedForm
from orchestrator.http.forms import Choice
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.requests import Prompts, prompts_of, text_prompts
from orchestrator.http.structure import Structure, refusal
from orchestrator.workers.model import Model
from outrider.v1 import generation_pb2, tokens_pb2

PREFIX: Final = "cmpl-"
NAMES: Final = {"text": "prompt", "token_ids": "prompt"}
_MAX_TOKENS: Final = 16
"""OpenAI's default."""


def prompts(body: CompletionBody, structure: Structure | None) -> Prompts:
    """Return the prompts of a body; raise `HttpError` for fields that do not go together.

    Args:
        body: the body.
        structure: what the outputs must follow; None for free text.
    """
    if body.echo and body.logprobs is not None:
        problem = "echo does not go with logprobs: the prompt's tokens have none"
        raise refusal(problem, "echo")
    return prompts_of(body, text_prompts(body.prompt), body.max_tokens or _MAX_TOKENS, body.logprobs, structure)


def echoes(body: CompletionBody, messages: Sequence[generation_pb2.GenerateRequest], model: Model) -> list[str]:
    """Return the text that precedes each choice: its prompt, where the body asks for it."""
    if not body.echo:
        return [""] * len(messages)
    return [_prompt_text(message, model) for message in messages]


def _prompt_text(message: generation_pb2.GenerateRequest, model: Model) -> str:
    token_ids = message.token_ids.token_ids
    # What is wrong with token ids is said by the service, which checks them first.
    if not token_ids or model.tokenizer is None or len(token_ids) > model.max_session_len:
        return message.text
    if max(token_ids) >= model.vocabulary_size:
        return ""
    return model.tokenizer.backend.decode(list(token_ids), skip_special_tokens=True)


class CompletionForm(ChunkedForm):
    """Completions, and their chunks.

    Args:
        response_id: see `Form`.
        model: see `Form`.
        echoed: text ahead of each choice.
        num_per_prompt: see `Form`.
        texts: see `ChunkedForm`.
        with_logprobs: see `ChunkedForm`.
        with_usage: see `ChunkedForm`.
        with_usage_so_far: see `ChunkedForm`.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        response_id: str,
        model: str,
        echoed: Sequence[str],
        num_per_prompt: int,
        texts: TokenTexts,
        *,
        with_logprobs: bool,
        with_usage: bool,
        with_usage_so_far: bool,
    ) -> None:
        super().__init__(
            response_id,
            model,
            len(echoed),
            num_per_prompt,
            texts,
            with_logprobs=with_logprobs,
            with_usage=with_usage,
            with_usage_so_far=with_usage_so_far,
        )
        self._echoed = echoed
        # Where the text of each choice has come to, for the offsets of log-probabilities.
        self._lengths = [0] * len(echoed)

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return the prompt where it is echoed."""
        echo = self._echoed[choice.index]
        return {"text": echo} if echo else None

    def output(self, choice: Choice, text: str, parts: Sequence[generation_pb2.OutputPart] = ()) -> dict[str, Any]:
        """Return the text."""
        return {"text": text}

    def has_output(self, output: Mapping[str, Any]) -> bool:
        """Return whether there is text."""
        return bool(output["text"])

    def answer(self, choice: Choice) -> dict[str, Any]:
        """Return the text, behind the prompt where it is echoed."""
        return {"text": self._echoed[choice.index] + "".join(choice.text)}

    def logprobs(
        self, choice: Choice, token_ids: Sequence[int], known: Sequence[tokens_pb2.TokenLogprobs]
    ) -> dict[str, Any]:
        """Return the log-probabilities, and where each token begins."""
        found = self.texts.completion(token_ids, known, self._lengths[choice.index])
        self._lengths[choice.index] += sum(map(len, found["tokens"]))
        return found
