"""Sampling parameters, which define the output distribution given the target's logits; names and order are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from math import isfinite

from outrider.errors import InvalidArgument

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SPECULATIVE_TOKENS = 64
"""Largest `num_speculative_tokens` of a request: tokens drafted along one path of a proposal."""
MAX_SEED = 2**64 - 1
MAX_TOKENS = 2**31 - 1
MIN_TEMPERATURE = 1e-12
MIN_TOP_P = 1e-12
MIN_REPETITION_PENALTY = 0.01
"""Values closer to 0 would have no further effect, and would divide by almost 0. With these bounds the logits times
100, and their differences over 1e-12, stay far below the largest float64 (and float32, for logits of real models)."""


class AcceptanceRule(Enum):
    """The rules that decide whether a drafted token is accepted; both are lossless (see `verification`)."""

    COUPLED = "coupled"
    REJECTION = "rejection"


class FinishReason(Enum):
    """The reasons for which a request ends."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The sampling parameters of a request: its output distribution, stop conditions and length.

    Every value is checked here; a wrong one raises `InvalidArgument` with the field's name. Token ids
    are checked against a vocabulary by `check_vocabulary`.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding. 0, or in [1e-12, 100].
        top_k: keeps the k most likely tokens; 0 keeps all.
        top_p: keeps the smallest set of most likely tokens with at least this probability. In [1e-12, 1].
        min_p: drops tokens less likely than this share of the most likely one. In [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output. In
            [0.01, 10].
        presence_penalty: subtracted from logits of tokens in the output. In [-2, 2].
        frequency_penalty: subtracted from logits once per occurrence of the token in the output. In [-2, 2].
        logit_bias: added to the logits of its token ids; at most 1024 values, in [-100, 100].
        seed: key of all randomness, in [0, 2**64); None until the orchestrator draws one.
        stop: the output ends before the first of these strings; at most 16, of 1 to 256 characters.
        stop_token_ids: the output ends with the first of these token ids; at most 64.
        max_tokens: maximum number of output tokens, at least 1.
        min_tokens: output tokens before which no stop condition applies; stop and end-of-text ids are not sampled.
        ignore_eos: whether generation continues after the model's end-of-text tokens.
        logprobs: None for none, else how many most likely tokens to report at each position, in [0, 20].
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0:
            _check_range("temperature", self.temperature, MIN_TEMPERATURE, 100, "0 or ")
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("top_p", self.top_p, MIN_TOP_P, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check_range("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens")
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_collections()

    def _check_collections(self) -> None:
        _check_num("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES)
        for value in self.logit_bias.values():
            _check_range("logit_bias", value, -100, 100)
        _check_num("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_num("stop", len(self.stop), MAX_STOP_STRINGS)
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_LEN:
                raise InvalidArgument(
                    f"stop has a string of {len(text)} characters, must be 1 to {MAX_STOP_STRING_LEN}", "stop"
                )

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Check the parameters against a vocabulary of `vocabulary_size` tokens.

        Raises:
            InvalidArgument: a token id is not below `vocabulary_size`, `logprobs` exceeds it, or no token could be
                sampled.
        """
        if self.logprobs is not None and self.logprobs > vocabulary_size:
            raise InvalidArgument(f"logprobs is {self.logprobs}, the vocabulary has {vocabulary_size}", "logprobs")
        for name, token_ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token_id in token_ids:
                if not 0 <= token_id < vocabulary_size:
                    raise InvalidArgument(f"{name} has token id {token_id}, the vocabulary has {vocabulary_size}", name)
        # Stop tokens are not sampled before `min_tokens`.
        if self.min_tokens and len(set(self.stop_token_ids)) >= vocabulary_size:
            problem = "stop_token_ids has the whole vocabulary, but min_tokens requires output"
            raise InvalidArgument(problem, "stop_token_ids")

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: the most likely token is chosen."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the distribution depends on the previous tokens (penalties)."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def with_seed(self, seed: int) -> "SamplingParameters":
        """Return the same parameters with that seed."""
        return replace(self, seed=seed)

    def as_dict(self) -> dict[str, object]:
        """Return the values by field name, as built-in types."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()}


def _check_range(name: str, value: float, low: float, high: float, also: str = "") -> None:
    if not isfinite(value) or not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}, must be {also}in [{low}, {high}]", name)


def _check_num(name: str, num: int, most: int) -> None:
    if num > most:
        raise InvalidArgument(f"{name} has {num} entries, may have at most {most}", name)
