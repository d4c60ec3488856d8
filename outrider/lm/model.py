"""The interface of language models: a forward pass over the rows of many sessions, and a KV cache per session."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outrider.control.pass_times import MULTIPLES_OF_FOUR, PaddedSizes
from outrider.lm.pages import KVUsage
from outrider.tokens import ProposalTree, TokenSpan


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity and limits of a loaded model.

    Attributes:
        name: name of the model, as configured.
        fingerprint: SHA-256, in hexadecimal, of configuration and weights.
        tokenizer_fingerprint: SHA-256, in hexadecimal, of the vocabulary; empty if there is no tokenizer.
        numerics: device, dtype, kernels and parallelism: everything that determines the bits of a logit.
        vocabulary_size: V; token ids are below it.
        max_session_len: longest session, in tokens.
        eos_token_ids: end-of-text token ids.
        kv_token_bytes: KV cache per token, in bytes.
        num_layers: decoder layers whose features a draft may request; 0 if there are none.
        hidden_size: H, width of one feature; 0 if there are none.
        weights_fingerprint: SHA-256, in hexadecimal, of the weights, independent of the dtype they are served in.
        padded_sizes: padded batch sizes that cost no more.
        part_rows: rows of the parts that a pass is run in; fewer take as long where contexts are short.
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
    padded_sizes: PaddedSizes = MULTIPLES_OF_FOUR
    part_rows: int = 1


class KVCache(Protocol):
    """Keys and values of one session's tokens at positions 0 .. cached_len - 1."""

    @property
    def cached_len(self) -> int:
        """Number of cached tokens."""

    @property
    def num_bytes(self) -> int:
        """Memory of the session's cache, in bytes; memory shared with other sessions counts in full."""

    @property
    def is_current(self) -> bool:
        """Whether all features that the model stores now are stored for the cached positions."""

    def fork(self, length: int) -> "KVCache":
        """Return a new cache with the first `length` positions of this one, in shared memory (copy-on-write)."""

    def shared_bytes(self, length: int) -> int:
        """Return the memory, in bytes, that a fork at `length` still shares after it has a token of its own."""

    def missing_bytes(self, length: int) -> int:
        """Return the additional memory, in bytes, for `length` cached tokens."""

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on; no-op if fewer are cached."""

    def release(self) -> None:
        """Drop all positions; `adopt` can restore them until they are evicted."""

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Extend the cache with prefix-cache hits of these token ids, except the last; return the tokens added."""

    def absent(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return index and digest of each full page that `adopt` cannot find: the first miss and all pages after it."""

    def next_page(self, token_ids: Sequence[int]) -> bytes | None:
        """Return the digest of the next page to become full with these tokens; None if they do not fill it."""

    def reserve(self, span: TokenSpan, tree: ProposalTree) -> bool:
        """Allocate the memory of a step; return False, without a change, if there is too little."""

    def keep(self, path: Sequence[int]) -> None:
        """Keep the branch of accepted node numbers of the last pass's tree; drop the rest of the tree."""


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One session's rows of a pass: a span of its tokens, then a proposal tree below the span's last token.

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
        """Rows of this step in the pass."""
        return len(self.span.token_ids) + len(self.tree)


class FeatureSource(Protocol):
    """The features of a model's cached positions; see `features`."""

    def keep(self, layers: Sequence[int], min_len: int = 0) -> None:
        """Store the features of these layers too, from the next pass on.

        Caches created before are not `is_current`, and must not be read from.

        Args:
            layers: layer numbers, in [0, num_layers].
            min_len: length of a session, in tokens, that must still fit into the KV cache.

        Raises:
            ModelUnsupported: there are no such layers, too many layers, or too little memory.
        """

    def read(self, cache: KVCache, layers: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return the features of cached positions start .. end - 1: bfloat16 [end - start, len(layers) * H]."""


class BlockSource(Protocol):
    """The full pages of a model's KV cache as bytes; see `kv_blocks`."""

    @property
    def layout(self) -> str:
        """Description of shapes, dtypes and features; blocks are compatible only if it is equal."""

    @property
    def block_len(self) -> int:
        """Positions per block."""

    @property
    def block_bytes(self) -> int:
        """Size of a block, in bytes."""

    def take_fresh(self) -> list[tuple[bytes, torch.Tensor]]:
        """Return digest and content, uint8 [block_bytes], of each page filled since the last call."""

    def put(self, digest: bytes, content: torch.Tensor) -> bool:
        """Restore a page to the prefix cache.

        Args:
            digest: digest of the page.
            content: from `take_fresh`, of this or another process: uint8 [block_bytes].

        Returns:
            Whether the page is in the prefix cache now; False if sessions hold all pages.
        """


class LanguageModel(Protocol):
    """A batch-invariant causal language model: bits do not depend on how a position was computed."""

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of the KV cache."""

    @property
    def features(self) -> FeatureSource | None:
        """Features for drafts that read them; None if the model has no layers."""

    @property
    def blocks(self) -> BlockSource | None:
        """KV blocks that can be stored outside of the process; None if the model does not support them."""

    def new_cache(self, salt: bytes = b"") -> KVCache:
        """Return an empty KV cache for one session, which shares pages only with sessions of the same salt."""

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Run one pass over all steps.

        Returns:
            For each step, logits [1 + len(tree), V]: row 0 is after the span's last token, row n after node n.
            [0, V] if `wants_logits` is false.
        """


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows [N, V] that follow each other in parts, [n, V]; not copied where they lie in one tensor already."""
    full = [part for part in parts if part.numel()]
    if not full:
        return parts[0]
    first = full[0]
    ends = [part.data_ptr() + part.nbytes for part in full]
    follow = all(part.data_ptr() == end for part, end in zip(full[1:], ends, strict=False))
    storage = first.untyped_storage().data_ptr()
    are_one = all(part.is_contiguous() and part.untyped_storage().data_ptr() == storage for part in full)
    if not follow or not are_one:
        return torch.cat(full)
    return first.as_strided((sum(map(len, full)), *first.shape[1:]), first.stride())
