"""A language model of known law: a table decides the next token by the last few. For proofs, tests and benches.

Its name carries its options, so that it can be given wherever a model's name can:

    markov:vocabulary=16,order=2,seed=7,scale=2.0,noise=0.3,noise_seed=1,step_s=0.01,eos=3

`noise` mixes the law with that of another table, which makes a draft of known quality for the target without noise.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from outrider.errors import InvalidArgument
from outrider.lm.model import ModelInfo, SessionStep
from outrider.tokens import ProposalTree

_PREFIX = "markov:"
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class MarkovOptions:
    """What a Markov model is made from.

    Attributes:
        vocabulary: V, at least 2.
        order: number of last tokens that decide; shorter contexts are filled with token 0 in front.
        seed: of the table.
        scale: standard deviation of the logits; larger is more certain.
        noise: share of the other table's law in the mixture, in [0, 1].
        noise_seed: of the other table.
        step_s: seconds that a pass takes, to stand for a larger model.
        row_s: further seconds for each row of a pass.
        eos: end-of-text token id; absent (a negative value) for none.
        max_len: longest session.
    """

    vocabulary: int = 16
    order: int = 1
    seed: int = 0
    scale: float = 1.5
    noise: float = 0.0
    noise_seed: int = 1
    step_s: float = 0.0
    row_s: float = 0.0
    eos: int | None = None
    max_len: int = 65536

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.order < 1 or self.vocabulary**self.order > 2**22:
            raise InvalidArgument(f"a table of {self.vocabulary}^{self.order} contexts cannot be made", "model")
        if not 0 <= self.noise <= 1 or self.step_s < 0 or self.row_s < 0:
            raise InvalidArgument("noise must be in [0, 1], step_s and row_s at least 0", "model")


class MarkovKVCache:
    """The tokens themselves stand for keys and values."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._cached_len = 0
        self._tree = ProposalTree()

    @property
    def cached_len(self) -> int:
        """Tokens cached."""
        return self._cached_len

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return _TOKEN_BYTES * len(self.token_ids)

    def truncate(self, length: int) -> None:
        """Drops everything from position `length` on."""
        self._cached_len = min(self._cached_len, length)
        self._tree = ProposalTree()

    def append(self, token_ids: Sequence[int], tree: ProposalTree) -> None:
        """Adds a span and holds a tree until `keep`."""
        self.token_ids[self._cached_len :] = token_ids
        self._cached_len += len(token_ids)
        self._tree = tree

    def keep(self, path: Sequence[int]) -> None:
        """Keeps the branch through these nodes."""
        self.append([self._tree.node(number).token_id for number in path], ProposalTree())


class MarkovModel:
    """A `LanguageModel` whose law is a table; see the module."""

    def __init__(self, options: MarkovOptions, name: str) -> None:
        self.options = options
        size = (options.vocabulary**options.order, options.vocabulary)
        law = torch.softmax(_table(options.seed, size) * options.scale, dim=-1)
        other = torch.softmax(_table(options.noise_seed, size) * options.scale, dim=-1)
        self._law = (1 - options.noise) * law + options.noise * other
        self._logits = self._law.log()
        self._info = ModelInfo(
            name=name,
            fingerprint=hashlib.sha256(self._law.numpy().tobytes()).hexdigest(),
            tokenizer_fingerprint=hashlib.sha256(f"markov {options.vocabulary}".encode()).hexdigest(),
            numerics="table float64 invariant",
            vocabulary_size=options.vocabulary,
            max_session_len=options.max_len,
            eos_token_ids=() if options.eos is None else (options.eos,),
            kv_token_bytes=_TOKEN_BYTES,
        )

    @classmethod
    def from_name(cls, name: str) -> "MarkovModel":
        """Returns the model of a name such as `markov:vocabulary=16,seed=7`."""
        kinds = {item.name: float if item.type in (float, "float") else int for item in fields(MarkovOptions)}
        given: dict[str, float] = {}
        for part in filter(None, name.removeprefix(_PREFIX).split(",")):
            key, _, value = part.partition("=")
            try:
                given[key] = kinds[key](value)
            except (KeyError, ValueError) as error:
                raise InvalidArgument(f"{part!r} is no option of a Markov model", "model") from error
        return cls(MarkovOptions(**given), name)  # type: ignore[arg-type]

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""
        return self._info

    @property
    def law(self) -> torch.Tensor:
        """The exact next-token law: float64 [V ** order, V]; row sum(token * V ** age), the last token having age 0."""
        return self._law

    def context(self, token_ids: Sequence[int]) -> int:
        """Returns the row of `law` that follows these tokens."""
        size = self.options.vocabulary
        recent = token_ids[-self.options.order :]
        return sum(token * size**age for age, token in enumerate(reversed(recent)))

    def new_cache(self) -> MarkovKVCache:
        """Returns an empty cache for one session."""
        return MarkovKVCache()

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Looks the rows up; takes as long as the options say. Logits are float64."""
        started = time.perf_counter()
        outputs = [self._run(step) for step in steps]
        rows = sum(step.num_rows for step in steps)
        # Stands for a model's computation: the thread is as busy as a device would keep it waiting.
        time.sleep(max(0.0, self.options.step_s + rows * self.options.row_s - (time.perf_counter() - started)))
        return outputs

    def _run(self, step: SessionStep) -> torch.Tensor:
        cache = step.cache
        if not isinstance(cache, MarkovKVCache):
            raise TypeError("the cache was made by another model class")
        cache.append(step.span.token_ids, step.tree)
        if not step.wants_logits:
            return self._logits[:0]
        history = cache.token_ids[max(0, cache.cached_len - self.options.order) : cache.cached_len]
        paths = [step.tree.path(number) for number in range(len(step.tree) + 1)]
        branches = [[*history, *(step.tree.node(node).token_id for node in path)] for path in paths]
        return self._logits[[self.context(branch) for branch in branches]]


def _table(seed: int, size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)
