"""What a worker needs of a language model: one forward pass over the rows of many sessions, and a KV cache for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outrider.control.pass_sizes import FOURS, PassSizes
from outrider.lm.pages import KVUsage
from outrider.tokens import ProposalTree, TokenSpan


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity and limits of a loaded model.

    Attributes:
        name: as configured.
        fingerprint: SHA-256 in hexadecimal over configuration and identity of the weights.
        tokenizer_fingerprint: SHA-256 in hexadecimal over the vocabulary; empty where there is no tokenizer.
        numerics: device, dtype, kernels and parallelism; what decides the bits of a logit.
        vocabulary_size: V; token ids are below it.
        max_session_len: longest session in tokens.
        eos_token_ids: the model's end-of-text tokens.
        kv_token_bytes: KV cache of one token, in bytes.
        num_layers: decoder layers whose features a draft may ask for; 0 where there are none.
        hidden_size: H, width of one feature; 0 where there are none.
        weights_fingerprint: SHA-256 in hexadecimal over the weights, whichever dtype they are served in.
        pass_sizes: which numbers of rows cost a pass alike.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    numerics: str
    vocabulary_size: int
    max_session_len: int
    eos_token_ids: tuple[int, ...]
    kv_token_bytes: int
    num_layers: int = 0
    hidden_size: int = 0
    weights_fingerprint: str = ""
    pass_sizes: PassSizes = FOURS


class KVCache(Protocol):
    """Keys and values of one session's tokens at positions 0 .. cached_len - 1."""

    @property
    def cached_len(self) -> int:
        """Tokens cached."""

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes; what is shared with other sessions in full."""

    @property
    def is_current(self) -> bool:
        """Whether what it holds has the features that are kept now."""

    def fork(self, length: int) -> "KVCache":
        """Returns another cache that holds the first `length` positions of this one, in memory that both share."""

    def shared_bytes(self, length: int) -> int:
        """Returns the memory that a fork at a length goes on sharing once it has a token of its own."""

    def missing_bytes(self, length: int) -> int:
        """Returns the memory that caching `length` tokens would take beyond what is held."""

    def truncate(self, length: int) -> None:
        """Drops everything from position `length` on, in O(1); no-op where less is cached."""

    def release(self) -> None:
        """Drops everything; what can be found again is, by `adopt`, until its memory is needed."""

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Takes what is cached, by whichever session, of these tokens (but for the last); returns the tokens gained."""

    def absent(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Returns index and digest of each full page, from the first on, that `adopt` would take but cannot find."""

    def next_page(self, token_ids: Sequence[int]) -> bytes | None:
        """Returns the identity of what caching these tokens would make findable next; None where it is too little."""

    def reserve(self, span: TokenSpan, tree: ProposalTree) -> bool:
        """Takes the memory that a step needs; False, and nothing is taken, where too little is left."""

    def keep(self, path: Sequence[int]) -> None:
        """Keeps, of the tree that the last pass ran, the branch through these node numbers; drops the rest."""


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One session's share of a pass: a span of its tokens, then a tree of proposed ones below the span's last token.

    `span` starts at `cache.cached_len` and is not empty. `tree` is empty unless the span ends the session's tokens.
    After the pass `cache.cached_len == span.end`; the tree's keys and values are pending until `cache.keep`.
    """

    cache: KVCache
    span: TokenSpan
    tree: ProposalTree = field(default_factory=ProposalTree)
    wants_logits: bool = True

    def __post_init__(self) -> None:
        if not self.span.token_ids:
            raise ValueError("a step needs at least one token")
        if self.span.start != self.cache.cached_len:
            raise ValueError(f"span starts at {self.span.start}, the cache ends at {self.cache.cached_len}")

    @property
    def num_rows(self) -> int:
        """Rows this step adds to the pass."""
        return len(self.span.token_ids) + len(self.tree)


class FeatureSource(Protocol):
    """Features of a model's cached positions; see `features`."""

    def keep(self, layers: Sequence[int], min_len: int = 0) -> None:
        """Has all passes from now on keep the features of these layers too.

        Caches that were made before are not `is_current`, and not to be read from.

        Args:
            layers: their numbers.
            min_len: tokens of a session that must still fit into the KV cache.

        Raises:
            ModelUnsupported: there are no such layers, they are too many, or there is no memory for them.
        """

    def read(self, cache: KVCache, layers: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Returns the features of cached positions start .. end - 1: bfloat16 [end - start, len(layers) * H]."""


class BlockSource(Protocol):
    """Full pages of a model's KV cache as bytes; see `kv_blocks`."""

    @property
    def layout(self) -> str:
        """Names everything that must agree for a block's bytes to mean the same: shapes, dtypes, features."""

    @property
    def block_len(self) -> int:
        """Positions of a block."""

    @property
    def block_bytes(self) -> int:
        """Size of a block."""

    def take_fresh(self) -> list[tuple[bytes, torch.Tensor]]:
        """Returns digest and content, uint8 [block_bytes], of each page that has become full since the last call."""

    def put(self, digest: bytes, index: int, content: torch.Tensor) -> bool:
        """Makes a page findable again.

        Args:
            digest: of the page.
            index: its place in its sessions: it begins at position index * block_len.
            content: what `take_fresh` returned, in this process or in another.

        Returns:
            Whether it can be found now; False where no memory is left that nobody holds.
        """


class LanguageModel(Protocol):
    """A causal language model whose bits do not depend on how a position was computed (see docs/architecture.md)."""

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""

    @property
    def kv_usage(self) -> KVUsage:
        """How full the KV cache is."""

    @property
    def features(self) -> FeatureSource | None:
        """What is kept for drafts that are made of a target's features; None where it has no layers to give any of."""

    @property
    def blocks(self) -> BlockSource | None:
        """Its KV cache in parts that can be kept elsewhere; None where it has none that could."""

    def new_cache(self, salt: bytes = b"") -> KVCache:
        """Returns an empty KV cache for one session, which shares memory with sessions of the same salt only."""

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Runs one pass over all steps.

        Returns:
            For each step, logits [1 + len(tree), V]: row 0 follows the span's last token, row n follows node n.
            [0, V] where `wants_logits` is false.
        """
