"""A Markov model: a table has the distribution of the next token given the last few. For proofs, tests and benchmarks.

Its options are part of its name, so that it can be used as any other model:

    markov:vocabulary=16,order=2,seed=7,scale=2.0,noise=0.3,noise_seed=1,step_s=0.01,eos=3

`noise` mixes the table with another one, which makes a draft of known quality for the target without noise.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from outrider.control.pass_times import MULTIPLES_OF_FOUR, PaddedSizes
from outrider.errors import InvalidArgument
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer, printable_tokens
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.model import ModelInfo, SessionStep
from outrider.lm.pages import KVUsage, PagePool
from outrider.lm.step_layout import PageCopy

_PREFIX = "markov:"
_TOKEN_BYTES = 4
_PAGE_LEN = 16


@dataclass(frozen=True, slots=True)
class MarkovOptions:
    """Options of a Markov model.

    Attributes:
        vocabulary: V, at least 2.
        order: number of last tokens that the next token depends on; shorter contexts are padded with token 0 in front.
        seed: seed of the table.
        scale: standard deviation of the logits.
        noise: weight of the other table in the mixture, in [0, 1].
        noise_seed: seed of the other table.
        step_s: minimum seconds per pass, to simulate a larger model.
        row_s: additional seconds per row of a pass.
        padding: the rows of a pass are timed as the next multiple of this number, at least 1.
        eos: end-of-text token id; None for none.
        max_len: longest session, in tokens.
        text: 1 for a model with text: a token for each byte, of which the printable ones are drawn, a chat template,
            and its end-of-text token; `vocabulary` and `eos` are set by it.
    """

    vocabulary: int = 16
    order: int = 1
    seed: int = 0
    scale: float = 1.5
    noise: float = 0.0
    noise_seed: int = 1
    step_s: float = 0.0
    row_s: float = 0.0
    padding: int = 1
    eos: int | None = None
    max_len: int = 65536
    text: int = 0

    def __post_init__(self) -> None:
        if self.text:
            object.__setattr__(self, "vocabulary", VOCABULARY_SIZE)
            object.__setattr__(self, "eos", EOS)
        if self.vocabulary < 2 or self.order < 1 or self.vocabulary**self.order > 2**22:
            raise InvalidArgument(
                f"vocabulary ** order is {self.vocabulary} ** {self.order}, must be 2 ** 1 to 2 ** 22", "model"
            )
        if not 0 <= self.noise <= 1 or self.step_s < 0 or self.row_s < 0 or self.padding < 1:
            raise InvalidArgument("noise must be in [0, 1], step_s and row_s at least 0, padding at least 1", "model")


class MarkovModel:
    """A `LanguageModel` that looks up the next token's distribution in a table; see the module.

    Attributes:
        tokenizer: files of its tokenizer; None for a model without text.
        transitions: distributions of the next token, float64 [V ** order, V]; the row of a context is the sum of
            token * V ** age, with age 0 for the last token.
    """

    def __init__(self, options: MarkovOptions, name: str, kv_budget_bytes: int = 1 << 30) -> None:
        self.options = options
        size = (options.vocabulary**options.order, options.vocabulary)
        distribution = torch.softmax(_table(options.seed, size) * options.scale, dim=-1)
        other = torch.softmax(_table(options.noise_seed, size) * options.scale, dim=-1)
        self.transitions = (1 - options.noise) * distribution + options.noise * other
        self.tokenizer = byte_tokenizer() if options.text else None
        if options.text:
            unseen = [token for token in range(EOS) if token not in set(printable_tokens())]
            self.transitions[:, unseen] = 0
            self.transitions /= self.transitions.sum(dim=-1, keepdim=True)
        self._logits = self.transitions.log()
        self._info = ModelInfo(
            name=name,
            fingerprint=hashlib.sha256(self.transitions.numpy().tobytes()).hexdigest(),
            tokenizer_fingerprint=self.tokenizer.fingerprint if self.tokenizer else _fingerprint(options.vocabulary),
            numerics="table float64 invariant",
            vocabulary_size=options.vocabulary,
            max_session_len=options.max_len,
            eos_token_ids=() if options.eos is None else (options.eos,),
            kv_token_bytes=_TOKEN_BYTES,
            padded_sizes=PaddedSizes(options.padding, options.padding) if options.padding > 1 else MULTIPLES_OF_FOUR,
        )
        page_bytes = _PAGE_LEN * _TOKEN_BYTES
        self._pool = PagePool(kv_budget_bytes // page_bytes, _PAGE_LEN, page_bytes, self._info.fingerprint.encode())
        # Token ids are stored in place of keys and values; pages, tables and branches are those of every model.
        self._slots: dict[int, int] = {}

    @classmethod
    def from_name(cls, name: str, kv_budget_bytes: int = 1 << 30) -> "MarkovModel":
        """Return the model of a name such as `markov:vocabulary=16,seed=7`; raise `InvalidArgument` if it is bad."""
        kinds = {item.name: float if item.type in (float, "float") else int for item in fields(MarkovOptions)}
        given: dict[str, float] = {}
        for part in filter(None, name.removeprefix(_PREFIX).split(",")):
            key, _, value = part.partition("=")
            try:
                given[key] = kinds[key](value)
            except (KeyError, ValueError) as error:
                raise InvalidArgument(f"{part!r} is not an option of a Markov model", "model") from error
        return cls(MarkovOptions(**given), name, kv_budget_bytes)  # type: ignore[arg-type]

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""
        return self._info

    def context(self, token_ids: Sequence[int]) -> int:
        """Return the row of `transitions` for the token after these."""
        size = self.options.vocabulary
        recent = token_ids[-self.options.order :]
        return sum(token * size**age for age, token in enumerate(reversed(recent)))

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of the KV cache."""
        return self._pool.usage

    @property
    def features(self) -> None:
        """None: a table has no layers."""

    @property
    def blocks(self) -> None:
        """None: recomputing is as cheap as restoring."""

    def new_cache(self, salt: bytes = b"") -> PagedKVCache:
        """Return an empty cache for one session."""
        return PagedKVCache(self._pool, salt)

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Look up the rows, and take at least the time that the options define; logits are float64."""
        started = time.perf_counter()
        outputs = [self._run(step) for step in steps]
        padding = self.options.padding
        rows = -(-sum(step.num_rows for step in steps) // padding) * padding
        # Simulates a model's computation, during which the thread waits for the device.
        time.sleep(max(0.0, self.options.step_s + rows * self.options.row_s - (time.perf_counter() - started)))
        return outputs

    def _run(self, step: SessionStep) -> torch.Tensor:
        cache = step.cache
        if not isinstance(cache, PagedKVCache):
            raise TypeError("the cache was made by another model class")
        layout = cache.lay_out(step.span, step.tree)
        self._copy(layout.copies)
        token_ids = [*step.span.token_ids, *(node.token_id for node in step.tree.nodes)]
        contexts = [0] * len(token_ids)
        for branch in layout.branches:
            for row, position in branch.writes:
                self._slots[_slot(branch.table, position)] = token_ids[row]
            for row, position in zip(branch.rows, branch.positions, strict=True):
                contexts[row] = self._context_at(branch.table, position)
        cache.mark_run()
        return self._logits[contexts[len(step.span.token_ids) - 1 :] if step.wants_logits else []]

    def _context_at(self, table: Sequence[int], position: int) -> int:
        first = max(0, position + 1 - self.options.order)
        return self.context([self._slots[_slot(table, at)] for at in range(first, position + 1)])

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        for source, target, length in copies:
            for offset in range(length):
                if (slot := source * _PAGE_LEN + offset) in self._slots:
                    self._slots[target * _PAGE_LEN + offset] = self._slots[slot]


def _slot(table: Sequence[int], position: int) -> int:
    return table[position // _PAGE_LEN] * _PAGE_LEN + position % _PAGE_LEN


def _fingerprint(vocabulary: int) -> str:
    return hashlib.sha256(f"markov {vocabulary}".encode()).hexdigest()


def _table(seed: int, size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)
