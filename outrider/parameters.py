"""Sampling parameters, which define the output distribution given the target's logits; names and order are vLLM's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any, Self

from outrider.constraint import Constraint
from outrider.errors import InvalidArgument

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SPECULATIVE_TOKENS = 64
"""Largest `num_speculative_tokens` of a request: tokens drafted along one path of a proposal."""
AT_SERVICE = "service"
AT_TARGET = "target"
DRAFT_PLACES = (AT_SERVICE, AT_TARGET)
"""Where a draft runs: in a service of its own, or within the target's process."""
MAX_SEED = 2**64 - 1
MAX_TOKENS = 2**31 - 1
MIN_TEMPERATURE = 1e-12
MIN_TOP_P = 1e-12
MIN_REPETITION_PENALTY = 0.01
"""Values closer to 0 would have no further effect, and would divide by almost 0. With these bounds the logits times
100, and their differences over 1e-12, stay far below the largest float64 (and float32, for logits of real models)."""

_KINDS: Mapping[type, str] = {str: "strings", Integral: "token ids"}


class AcceptanceRule(Enum):
    """The rules that decide whether a drafted token is accepted; all are lossless (see `verification`).

    `ENGINE` is the own sampling of a serving engine that a target embeds: its noise is not keyed by the request.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"
    ENGINE = "engine"

    @property
    def for_drafts(self) -> "AcceptanceRule":
        """The rule by which drafts propose for this one: they share no noise with an engine's own sampling."""
        return AcceptanceRule.COUPLED if self is AcceptanceRule.ENGINE else self


REPLAYABLE_RULES = (AcceptanceRule.COUPLED, AcceptanceRule.REJECTION)
"""The rules whose noise is keyed by the request and the position; Outrider's own engine serves these."""


class FinishReason(Enum):
    """The reasons for which a request ends."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class _GivenFields:
    """A base of dataclasses that keeps the names of the fields that its constructor was given.

    They stand beside the fields, not among them: two objects with equal values are equal, whichever were given.

    Attributes:
        given: the names.
    """

    __slots__ = ("given",)
    given: frozenset[str]

    def __new__(cls, *values: object, **named: object) -> Self:
        made = object.__new__(cls)
        positional = [item.name for item in fields(cls)][: len(values)]  # type: ignore[arg-type]
        object.__setattr__(made, "given", frozenset((*positional, *named)))
        return made


@dataclass(frozen=True, slots=True)
class SamplingParameters(_GivenFields):
    """The sampling parameters of a request: its output distribution, stop conditions and length.

    Every value is checked here; a wrong one raises `InvalidArgument` with the field's name. Token ids
    are checked against a vocabulary by `check_vocabulary`.

    A client sends the fields in `given` only: for the others the service has defaults of its own. `replace` and copies
    keep that right; `dataclasses.replace` does not, it gives every field.

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
        stop: the output ends before the first of these strings, or before this one; at most 16, of 1 to 256 characters.
        stop_token_ids: the output ends with the first of these token ids; at most 64.
        max_tokens: maximum number of output tokens, at least 1.
        min_tokens: output tokens before which no stop condition applies; stop and end-of-text ids are not sampled.
        ignore_eos: whether generation continues after the model's end-of-text tokens.
        logprobs: None for none, else how many most likely tokens to report at each position, in [0, 20].
        constraint: what the output's text must follow; None for free text. Tokens that it does not allow have
            probability 0, and where only the end is allowed, it is allowed despite `min_tokens`.
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
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0:
            _check_range("temperature", self.temperature, MIN_TEMPERATURE, 100, "0 or ")
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("top_p", self.top_p, MIN_TOP_P, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_whole("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check_whole("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.ignore_eos not in (False, True):
            raise InvalidArgument(f"ignore_eos is {self.ignore_eos!r}, must be True or False", "ignore_eos")
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_constraint()
        self._check_collections()

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            raise InvalidArgument(f"constraint is {self.constraint!r}, must be a Constraint", "constraint")
        if self.ignore_eos:
            raise InvalidArgument("ignore_eos does not go with a constraint, which ends the output", "ignore_eos")

    def _check_collections(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidArgument(f"logit_bias is {self.logit_bias!r}, must map token ids to numbers", "logit_bias")
        _check_num("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES)
        for value in self.logit_bias.values():
            _check_range("logit_bias", value, -100, 100)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, str))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, Integral))
        _tuple("logit_bias", self.logit_bias, Integral)
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

    def replace(self, **changes: Any) -> "SamplingParameters":
        """Return the same parameters with other values for some fields, which count as given too.

        Raises:
            InvalidArgument: a value is out of range.
            TypeError: there is no such field.
        """
        return SamplingParameters(**{name: getattr(self, name) for name in self.given} | changes)

    __replace__ = replace

    def with_seed(self, seed: int) -> "SamplingParameters":
        """Return the same parameters with that seed."""
        return self.replace(seed=seed)

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], "SamplingParameters"], tuple[dict[str, Any]]]:
        return _parameters_of, ({name: getattr(self, name) for name in self.given},)

    def as_dict(self) -> dict[str, object]:
        """Return the values by field name, as built-in types."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain |= {"logit_bias": dict(self.logit_bias)}
        return plain | {"constraint": None if self.constraint is None else self.constraint.as_dict()}


def _parameters_of(values: dict[str, Any]) -> SamplingParameters:
    """Return the parameters that were given these values: what a copy or a pickle of some is made by."""
    return SamplingParameters(**values)


def _check_range(name: str, value: Any, low: float, high: float, also: str = "") -> None:
    is_number = isinstance(value, Real)
    # NaN is not in the range either.
    if not is_number or not low <= value <= high:
        raise InvalidArgument(f"{name} is {value!r}, must be {also}in [{low}, {high}]", name)


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, Integral):
        raise InvalidArgument(f"{name} is {value!r}, must be a whole number", name)
    _check_range(name, value, low, high)


def _tuple(name: str, items: object, kind: type) -> tuple[Any, ...]:
    """Return the items; raise `InvalidArgument` unless all are of that kind."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise InvalidArgument(f"{name} is {items!r}, must be a list", name)
    found = tuple(items)
    for item in found:
        if not isinstance(item, kind):
            raise InvalidArgument(f"{name} has {item!r}, must have {_KINDS[kind]} only", name)
    return found


def _check_num(name: str, num: int, most: int) -> None:
    if num > most:
        raise InvalidArgument(f"{name} has {num} entries, may have at most {most}", name)
