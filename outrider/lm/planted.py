"""A pair of models that do their real work, and whose answers follow a known law: speed can be measured on any weights.

A planted model runs the forward passes of the model that it wraps, and then overwrites the logits. So a target and a
draft with random weights take the time of real ones, through the code that serves requests, while the draft is as good
as its options say. A name carries the options, so that it can be given wherever a model's name can:

    planted:base=embedded,acceptance=0.8,role=draft,seed=7,num_layers=2

The two of a pair have all options in common but `base`, `role` and `num_layers`; their vocabularies are of one size.
A base with commas in its own name is given with `;` in their place: `base=markov:vocabulary=64;order=1`.

The law is a function of a keyed hash of the last tokens. The target gives a few candidates a share each. The draft hits
with probability `acceptance`: then its law is the target's. Otherwise it misses: some decoys, tokens that the target
never gives, stand before the target's candidates, far enough that noise does not change the order. So under greedy
decoding as under `coupled` a draft that misses has the target's token right behind its decoys. How many there are is
drawn so that the token is among the next 1, 2 or 4 choices with the frequencies of `NEXT_CHOICES`. Under `rejection`
the acceptance is the same, since a law of decoys has nothing in common with the target's.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Final

import torch

from outrider.errors import InvalidArgument
from outrider.lm.model import BlockSource, KVCache, LanguageModel, ModelInfo, SessionStep
from outrider.lm.pages import KVUsage
from outrider.tokens import ProposalTree, TokenSpan

PREFIX: Final = "planted:"
NEXT_CHOICES: Final = {1: 0.5, 2: 0.65, 4: 0.8}
"""Where the draft's first choice misses: the share of positions at which the target's token is among the next n."""

# Exact in every floating dtype, so that a bfloat16 target and a float32 draft have one law.
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
class PlantedOptions:
    """What a planted model is made from.

    Attributes:
        base: name of the model that is wrapped.
        role: target or draft.
        acceptance: probability that the target outputs the draft's first choice, in [0, 1].
        seed: of the law.
        order: last tokens that decide, at least 1; with few, greedy texts soon run in circles.
        num_layers: first layers of the base that are run; 0 for all.
    """

    base: str = "embedded"
    role: str = "target"
    acceptance: float = 0.8
    seed: int = 0
    order: int = 4
    num_layers: int = 0

    def __post_init__(self) -> None:
        if self.role not in ("target", "draft"):
            raise InvalidArgument(f"role is {self.role!r}, must be target or draft", "model")
        if not 0 <= self.acceptance <= 1 or self.order < 1 or self.num_layers < 0 or not 0 <= self.seed < 2**64:
            raise InvalidArgument(
                "acceptance must be in [0, 1], order at least 1, seed and num_layers at least 0", "model"
            )

    @classmethod
    def from_name(cls, name: str) -> "PlantedOptions":
        """Returns the options of a name such as `planted:base=embedded,role=draft`; raises `InvalidArgument`."""
        kinds: dict[str, Callable[[str], object]] = {item.name: type(item.default) for item in fields(cls)}
        given: dict[str, object] = {}
        for part in filter(None, name.removeprefix(PREFIX).split(",")):
            key, _, value = part.partition("=")
            try:
                given[key] = kinds[key](value)
            except (KeyError, ValueError) as error:
                raise InvalidArgument(f"{part!r} is no option of a planted model", "model") from error
        options = cls(**given)  # type: ignore[arg-type]
        return replace(options, base=options.base.replace(";", ","))

    @property
    def name(self) -> str:
        """The name that gives these options."""
        given = asdict(self) | {"base": self.base.replace(",", ";")}
        return PREFIX + ",".join(f"{key}={value}" for key, value in given.items())


class PlantedLaw:
    """Both models' laws: which few tokens have logits above the floor after given last tokens.

    Args:
        options: seed, order and acceptance.
        vocabulary_size: V, at least 16 more than tokens are forbidden.
        forbidden: token ids that are never output. The laws of a pair agree but for rare contexts even if the two
            models forbid different ones.

    Raises:
        InvalidArgument: the vocabulary is too small.
    """

    def __init__(self, options: PlantedOptions, vocabulary_size: int, forbidden: Collection[int] = ()) -> None:
        if vocabulary_size - len(forbidden) < _MIN_VOCABULARY:
            raise InvalidArgument(f"a planted law needs {_MIN_VOCABULARY} tokens that may be output", "model")
        self.order = options.order
        self._acceptance = options.acceptance
        self._key = options.seed.to_bytes(8, "little")
        self._size = vocabulary_size
        self._forbidden = frozenset(forbidden)

    def target(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Returns the target's logits above the floor, token id to logit, after these last tokens."""
        return self._candidates(self._words(token_ids))[0]

    def draft(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Returns the draft's logits above the floor, token id to logit, after these last tokens."""
        words = self._words(token_ids)
        candidates, free = self._candidates(words)
        if words[0] / _TWO_32 < self._acceptance:
            return candidates
        num_decoys = _num_decoys(words[1] / _TWO_32)
        decoys = {next(free): _DECOY_GAP * rank for rank in range(1, num_decoys + 1)}
        return decoys | candidates if num_decoys < _NUM_DECOYS else decoys

    def _words(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        context = array("I", token_ids[-self.order :]).tobytes()
        return _WORDS.unpack(hashlib.blake2b(context, digest_size=_WORDS.size, key=self._key).digest())

    def _candidates(self, words: Sequence[int]) -> tuple[dict[int, float], Iterator[int]]:
        """Returns the target's candidates, and other token ids."""
        free = self._token_ids(words[2 : 2 + _NUM_CANDIDATES + _NUM_DECOYS])
        steps = (words[-1] >> 8 * number for number in range(_NUM_CANDIDATES - 1))
        candidates = {next(free): 0.0}
        candidates |= {next(free): -_LOGIT_STEP * (1 + (step & 0xFF) % _NUM_STEPS) for step in steps}
        return candidates, free

    def _token_ids(self, words: Sequence[int]) -> Iterator[int]:
        """Yields distinct token ids that may be output, one for each word."""
        taken = set(self._forbidden)
        for word in words:
            token_id = word % self._size
            while token_id in taken:
                token_id = (token_id + 1) % self._size
            taken.add(token_id)
            yield token_id


def _num_decoys(share: float) -> int:
    """Returns the tokens before the target's, for a number uniform in [0, 1); at most `_NUM_DECOYS`."""
    return next((num for num, frequency in NEXT_CHOICES.items() if share < frequency), _NUM_DECOYS)


class PlantedKVCache:
    """The inner model's cache, and which tokens it holds."""

    def __init__(self, inner: KVCache) -> None:
        self.inner = inner
        self.token_ids = array("I")
        self._tree = ProposalTree()

    @property
    def cached_len(self) -> int:
        """Tokens cached."""
        return self.inner.cached_len

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.inner.num_bytes

    @property
    def is_current(self) -> bool:
        """Whether what it holds has the features that are kept now."""
        return self.inner.is_current

    def fork(self, length: int) -> "PlantedKVCache":
        """Returns another cache that holds the first positions of this one."""
        other = PlantedKVCache(self.inner.fork(length))
        other.token_ids = self.token_ids[:length]
        return other

    def shared_bytes(self, length: int) -> int:
        """Returns the memory that a fork at a length goes on sharing."""
        return self.inner.shared_bytes(length)

    def missing_bytes(self, length: int) -> int:
        """Returns the memory that caching `length` tokens would take beyond what is held."""
        return self.inner.missing_bytes(length)

    def truncate(self, length: int) -> None:
        """Drops everything from position `length` on."""
        self.inner.truncate(length)
        del self.token_ids[length:]

    def release(self) -> None:
        """Drops everything; see `KVCache.release`."""
        self.inner.release()
        del self.token_ids[:]

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Takes what is cached of these tokens; returns the tokens gained."""
        gained = self.inner.adopt(token_ids)
        self.token_ids = array("I", token_ids[: self.inner.cached_len])
        return gained

    def absent(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Returns what `adopt` cannot find."""
        return self.inner.absent(token_ids)

    def next_page(self, token_ids: Sequence[int]) -> bytes | None:
        """Returns the identity of what caching these tokens would make findable next."""
        return self.inner.next_page(token_ids)

    def reserve(self, span: TokenSpan, tree: ProposalTree) -> bool:
        """Takes the memory that a step needs."""
        return self.inner.reserve(span, tree)

    def keep(self, path: Sequence[int]) -> None:
        """Keeps the branch through these nodes."""
        self.inner.keep(path)
        self.token_ids.extend(self._tree.node(number).token_id for number in path)

    def contexts(self, step: SessionStep, order: int) -> Iterator[list[int]]:
        """Notes that the step has been run; yields the last tokens at the span's end and at each node."""
        self.token_ids.extend(step.span.token_ids)
        self._tree = step.tree
        history = list(self.token_ids[-order:])
        for number in range(len(step.tree) + 1 if step.wants_logits else 0):
            yield [*history, *(step.tree.node(node).token_id for node in step.tree.path(number))][-order:]


class PlantedModel:
    """A `LanguageModel` that runs another one, and overwrites its logits; see the module.

    Args:
        base: what is run.
        options: see there.

    Raises:
        InvalidArgument: the vocabulary is too small.
    """

    def __init__(self, base: LanguageModel, options: PlantedOptions) -> None:
        self._base = base
        info = base.info
        self.law = PlantedLaw(options, info.vocabulary_size, info.eos_token_ids)
        self._law = self.law.target if options.role == "target" else self.law.draft
        self._eos_token_ids = list(info.eos_token_ids)
        digest = hashlib.sha256(f"{options.name} {info.fingerprint}".encode()).hexdigest()
        self._info = replace(info, name=options.name, fingerprint=digest, numerics=f"{info.numerics} planted")

    @property
    def info(self) -> ModelInfo:
        """Identity and limits: the base's, but for name and fingerprint."""
        return self._info

    @property
    def kv_usage(self) -> KVUsage:
        """How full the KV cache is."""
        return self._base.kv_usage

    @property
    def features(self) -> None:
        """None: what is planted follows from tokens, not from features."""

    @property
    def blocks(self) -> BlockSource | None:
        """The base's: what is planted follows from tokens."""
        return self._base.blocks

    def new_cache(self, salt: bytes = b"") -> PlantedKVCache:
        """Returns an empty cache for one session."""
        return PlantedKVCache(self._base.new_cache(salt))

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Runs the base's pass over all steps, and answers by the law."""
        caches = [_planted(step) for step in steps]
        inner = [replace(step, cache=cache.inner) for step, cache in zip(steps, caches, strict=True)]
        outputs = self._base.forward(inner)
        laws = [
            [self._law(context) for context in cache.contexts(step, self.law.order)]
            for step, cache in zip(steps, caches, strict=True)
        ]
        logits = self._logits([law for rows in laws for law in rows], outputs[0])
        return list(torch.split(logits, [len(rows) for rows in laws]))

    def _logits(self, laws: Sequence[dict[int, float]], like: torch.Tensor) -> torch.Tensor:
        """Returns the laws as logits [len(laws), V], computed where the base's were, after them."""
        logits = like.new_full((len(laws), self._info.vocabulary_size), _FLOOR)
        places = [(row, token_id) for row, law in enumerate(laws) for token_id in law]
        if places:
            values = like.new_tensor([logit for law in laws for logit in law.values()])
            logits[torch.tensor(places, device=like.device).unbind(1)] = values
        if self._eos_token_ids:
            logits[:, self._eos_token_ids] = -math.inf
        return logits


def _planted(step: SessionStep) -> PlantedKVCache:
    if not isinstance(step.cache, PlantedKVCache):
        raise TypeError("the cache was made by another model class")
    return step.cache
