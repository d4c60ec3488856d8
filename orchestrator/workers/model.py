"""The model that the targets in rotation host: what requests are checked against, and their prompts encoded with."""

from dataclasses import dataclass

from orchestrator.text.output import OutputText
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters
from outrider.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Model:
    """What a request needs to know of the targets before one of them is chosen.

    Attributes:
        fingerprint: of the model; the same at all targets in rotation.
        tokenizer_fingerprint: of its tokenizer.
        tokenizer: its tokenizer; None where it has none.
        vocabulary_size: token ids are below it.
        max_session_len: tokens of the longest session that each of the targets takes, so that any may take over.
        eos_token_ids: token ids that end a text.
    """

    fingerprint: str
    tokenizer_fingerprint: str
    tokenizer: Tokenizer | None
    vocabulary_size: int
    max_session_len: int
    eos_token_ids: tuple[int, ...]

    def check(self, message: generation_pb2.GenerateRequest, parameters: SamplingParameters) -> None:
        """Raises `InvalidArgument` with the name of a parameter that this model cannot follow."""
        parameters.check_vocabulary(self.vocabulary_size)
        # The default is not held against a small model: the end of the context ends the output anyway.
        if message.parameters.HasField("max_tokens") and parameters.max_tokens > self.max_session_len:
            raise InvalidArgument(
                f"max_tokens is {parameters.max_tokens}, sessions have at most {self.max_session_len} tokens",
                "max_tokens",
            )
        OutputText(self.tokenizer, parameters)

    def stop_token_ids(self, parameters: SamplingParameters) -> tuple[int, ...]:
        """Returns the token ids at which a request ends, in order."""
        eos = () if parameters.ignore_eos else self.eos_token_ids
        return tuple(sorted({*parameters.stop_token_ids, *eos}))
