"""Synthetic models: real forward passes, with the logits replaced by those of a known distribution, for benchmarks.

A synthetic model runs the forward passes of its base model and overwrites the logits. So a target and a draft with
random weights take the time of real models, through the code that serves requests, while the draft has a chosen
acceptance rate. The options are part of the name, so that it can be used as any other model:

    synthetic:base=embedded,acceptance=0.8,role=draft,seed=7,num_layers=2

Target and draft of a pair must have the same options, except `base`, `role`, `num_layers` and `texts`, and vocabularies
of the same size. Commas in the name of the base are written as `;`: `base=markov:vocabulary=64;order=1`.

The distribution is a function of a keyed hash of the last tokens. The target has a few candidate tokens with a
probability each. With probability `acceptance` the draft has the target's distribution. Otherwise it ranks some decoys,
tokens that the target never outputs, before the target's candidates, by margins that the sampling noise does not
overcome. So under greedy decoding and under `coupled` the target's token is the draft's next choice after the decoys.
The number of decoys is drawn so that the target's token is among the next 1, 2 or 4 choices with the frequencies of
`NEXT_CHOICES`. Under `rejection` the acceptance rate is the same, because a distribution of decoys does not overlap
with the target's.

With `texts`, the name of a file, sessions that begin as one of its texts go on as it does, at any temperature: what a
drafter has right of them is what it knows of the texts.
"""

import hashlib
import json
import math
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final

import torch

from outrider.errors import InvalidArgument
from outrider.lm.model import BlockSource, LanguageModel, ModelInfo, SessionStep
from outrider.lm.pages import KVUsage
from outrider.lm.synthetic_cache import SyntheticKVCache
from outrider.parameters import MAX_TOKENS

PREFIX: Final = "synthetic:"
NEXT_CHOICES: Final = {1: 0.5, 2: 0.65, 4: 0.8}
"""If the draft's first choice is wrong: probability that the target's token is among its next n choices, by n."""
RENAMED_PREFIX: Final = "planted:"
"""Former prefix of synthetic models, which is rejected with an error that has the current one."""

# These values are exact in every floating dtype: a bfloat16 target and a float32 draft have equal distributions.
_FLOOR: Final = -40.0
_DECOY_GAP: Final = 8.0
_LOGIT_STEP: Final = 0.125
_NUM_STEPS: Final = 24
_NUM_CANDIDATES: Final = 4
_NUM_DECOYS: Final = 5
_MIN_VOCABULARY: Final = 16
_WORDS: Final = struct.Struct("<16I")
_TWO_32: Final = 2.0**32


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Options of a synthetic model.

    Attributes:
        base: name of the model whose passes are run.
        role: target or draft.
        acceptance: probability that the target outputs the draft's first choice, in [0, 1].
        seed: key of the distribution, in [0, 2**64).
        order: number of last tokens that the next token depends on, at least 1; greedy texts with few soon repeat.
        num_layers: number of first layers of the base to run; 0 for all.
        texts: JSON file with lists of token ids, each a session from its beginning on; empty for none.
    """

    base: str = "embedded"
    role: str = "target"
    acceptance: float = 0.8
    seed: int = 0
    order: int = 4
    num_layers: int = 0
    texts: str = ""

    def __post_init__(self) -> None:
        if self.role not in ("target", "draft"):
            raise InvalidArgument(f"role is {self.role!r}, must be target or draft", "model")
        if not 0 <= self.acceptance <= 1 or self.order < 1 or self.num_layers < 0 or not 0 <= self.seed < 2**64:
            raise InvalidArgument(
                "acceptance must be in [0, 1], order at least 1, seed and num_layers at least 0", "model"
            )

    @classmethod
    def from_name(cls, name: str) -> "SyntheticOptions":
        """Return the options of a name such as `synthetic:base=embedded,role=draft`; raise `InvalidArgument`."""
        kinds: dict[str, Callable[[str], object]] = {item.name: type(item.default) for item in fields(cls)}
        given: dict[str, object] = {}
        for part in filter(None, name.removeprefix(PREFIX).split(",")):
            key, _, value = part.partition("=")
            try:
                given[key] = kinds[key](value)
            except (KeyError, ValueError) as error:
                raise InvalidArgument(f"{part!r} is not an option of a synthetic model", "model") from error
        options = cls(**given)  # type: ignore[arg-type]
        return replace(options, base=options.base.replace(";", ","))

    @property
    def name(self) -> str:
        """The model name with these options; the inverse of `from_name`."""
        given = asdict(self) | {"base": self.base.replace(",", ";")}
        return PREFIX + ",".join(f"{key}={value}" for key, value in given.items())


class SyntheticDistributions:
    """The distributions of a pair of synthetic models: the logits above the floor, after given last tokens.

    Args:
        options: seed, order and acceptance are used.
        vocabulary_size: V, at least 16 more than `forbidden` has.
        forbidden: token ids that are never output. The distributions of a pair are consistent, except for rare
            contexts, even if the two models forbid different ones.

    Raises:
        InvalidArgument: the vocabulary is too small.
    """

    def __init__(self, options: SyntheticOptions, vocabulary_size: int, forbidden: Collection[int] = ()) -> None:
        if vocabulary_size - len(forbidden) < _MIN_VOCABULARY:
            raise InvalidArgument(f"a synthetic model needs {_MIN_VOCABULARY} tokens that may be output", "model")
        self._order = options.order
        self._texts = _next_tokens(options.texts) if options.texts else {}
        # A text is known by all its tokens so far.
        self.order = MAX_TOKENS if options.texts else options.order
        self._acceptance = options.acceptance
        self._key = options.seed.to_bytes(8, "little")
        self._size = vocabulary_size
        self._forbidden = frozenset(forbidden)

    def target(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Return the target's logits above the floor, token id to logit, after these last tokens."""
        if self._texts and (token_id := self._texts.get(_digest(array("I", token_ids)))) is not None:
            return {token_id: 0.0}
        return self._candidates(self._words(token_ids))[0]

    def draft(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Return the draft's logits above the floor, token id to logit, after these last tokens."""
        words = self._words(token_ids)
        candidates, free = self._candidates(words)
        if words[0] / _TWO_32 < self._acceptance:
            return candidates
        num_decoys = _num_decoys(words[1] / _TWO_32)
        decoys = {next(free): _DECOY_GAP * rank for rank in range(1, num_decoys + 1)}
        return decoys | candidates if num_decoys < _NUM_DECOYS else decoys

    def _words(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        context = array("I", token_ids[-self._order :]).tobytes()
        return _WORDS.unpack(hashlib.blake2b(context, digest_size=_WORDS.size, key=self._key).digest())

    def _candidates(self, words: Sequence[int]) -> tuple[dict[int, float], Iterator[int]]:
        """Return the target's candidates with their logits, and an iterator of other token ids."""
        free = self._token_ids(words[2 : 2 + _NUM_CANDIDATES + _NUM_DECOYS])
        steps = (words[-1] >> 8 * number for number in range(_NUM_CANDIDATES - 1))
        candidates = {next(free): 0.0}
        candidates |= {next(free): -_LOGIT_STEP * (1 + (step & 0xFF) % _NUM_STEPS) for step in steps}
        return candidates, free

    def _token_ids(self, words: Sequence[int]) -> Iterator[int]:
        """Yield distinct token ids that may be output, one per word."""
        taken = set(self._forbidden)
        for word in words:
            token_id = word % self._size
            while token_id in taken:
                token_id = (token_id + 1) % self._size
            taken.add(token_id)
            yield token_id


def _next_tokens(path: str) -> dict[bytes, int]:
    """Return the token that follows each beginning of a file's texts; raise `InvalidArgument` if it cannot be read."""
    try:
        texts = [array("I", text) for text in json.loads(Path(path).read_text())]
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(
            f"texts is {path!r}, must be a JSON file with lists of token ids: {error}", "model"
        ) from error
    return {_digest(text[:end]): text[end] for text in texts for end in range(1, len(text))}


def _digest(token_ids: "array[int]") -> bytes:
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest()


def _num_decoys(share: float) -> int:
    """Return the number of decoys for a uniform number in [0, 1); at most `_NUM_DECOYS`."""
    return next((num for num, frequency in NEXT_CHOICES.items() if share < frequency), _NUM_DECOYS)


class SyntheticModel:
    """A `LanguageModel` that runs a base model and overwrites its logits; see the module.

    Args:
        base: model whose passes are run.
        options: see `SyntheticOptions`.

    Raises:
        InvalidArgument: the vocabulary is too small.
    """

    def __init__(self, base: LanguageModel, options: SyntheticOptions) -> None:
        self._base = base
        info = base.info
        self.distributions = SyntheticDistributions(options, info.vocabulary_size, info.eos_token_ids)
        self._distribution = self.distributions.target if options.role == "target" else self.distributions.draft
        self._eos_token_ids = list(info.eos_token_ids)
        digest = hashlib.sha256(f"{options.name} {info.fingerprint}".encode()).hexdigest()
        self._info = replace(info, name=options.name, fingerprint=digest, numerics=f"{info.numerics} synthetic")

    @property
    def info(self) -> ModelInfo:
        """Identity and limits: the base's, except name, fingerprint and numerics."""
        return self._info

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of the KV cache."""
        return self._base.kv_usage

    @property
    def features(self) -> None:
        """None: the distribution depends on tokens, not on features."""

    @property
    def blocks(self) -> BlockSource | None:
        """KV blocks of the base."""
        return self._base.blocks

    def new_cache(self, salt: bytes = b"") -> SyntheticKVCache:
        """Return an empty cache for one session."""
        return SyntheticKVCache(self._base.new_cache(salt))

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Run the base's pass over all steps, and return logits of the synthetic distribution."""
        caches = [_synthetic_cache(step) for step in steps]
        inner = [replace(step, cache=cache.inner) for step, cache in zip(steps, caches, strict=True)]
        outputs = self._base.forward(inner)
        distributions = [
            [self._distribution(context) for context in cache.contexts(step, self.distributions.order)]
            for step, cache in zip(steps, caches, strict=True)
        ]
        logits = self._logits([distribution for rows in distributions for distribution in rows], outputs[0])
        return list(torch.split(logits, [len(rows) for rows in distributions]))

    def _logits(self, distributions: Sequence[dict[int, float]], like: torch.Tensor) -> torch.Tensor:
        """Return the distributions as logits [len(distributions), V], on the device and in the dtype of `like`."""
        logits = like.new_full((len(distributions), self._info.vocabulary_size), _FLOOR)
        places = [(row, token_id) for row, distribution in enumerate(distributions) for token_id in distribution]
        if places:
            values = like.new_tensor([logit for distribution in distributions for logit in distribution.values()])
            logits[torch.tensor(places, device=like.device).unbind(1)] = values
        if self._eos_token_ids:
            logits[:, self._eos_token_ids] = -math.inf
        return logits


def _synthetic_cache(step: SessionStep) -> SyntheticKVCache:
    if not isinstance(step.cache, SyntheticKVCache):
        raise TypeError("the cache was made by another model class")
    return step.cache
