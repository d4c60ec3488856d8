"""The KV cache of a synthetic model: the cache of the base model, and the token ids in it."""

from array import array
from collections.abc import Iterator, Sequence

from outrider.lm.model import KVCache, SessionStep
from outrider.tokens import ProposalTree, TokenSpan


class SyntheticKVCache:
    """The KV cache of the base model, with the token ids of the cached positions.

    Args:
        inner: cache of the base model.
    """

    def __init__(self, inner: KVCache) -> None:
        self.inner = inner
        self.token_ids = array("I")
        self._tree = ProposalTree()

    @property
    def cached_len(self) -> int:
        """Number of cached tokens."""
        return self.inner.cached_len

    @property
    def num_bytes(self) -> int:
        """Memory of the session's cache, in bytes."""
        return self.inner.num_bytes

    @property
    def is_current(self) -> bool:
        """Whether all features that the model stores now are stored for the cached positions."""
        return self.inner.is_current

    def fork(self, length: int) -> "SyntheticKVCache":
        """Return a new cache with the first `length` positions of this one."""
        other = SyntheticKVCache(self.inner.fork(length))
        other.token_ids = self.token_ids[:length]
        return other

    def shared_bytes(self, length: int) -> int:
        """Return the memory, in bytes, that a fork at `length` still shares after it has a token of its own."""
        return self.inner.shared_bytes(length)

    def missing_bytes(self, length: int) -> int:
        """Return the additional memory, in bytes, for `length` cached tokens."""
        return self.inner.missing_bytes(length)

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on."""
        self.inner.truncate(length)
        del self.token_ids[length:]

    def release(self) -> None:
        """Drop all positions; see `KVCache.release`."""
        self.inner.release()
        del self.token_ids[:]

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Extend the cache with prefix-cache hits; return the number of tokens added."""
        gained = self.inner.adopt(token_ids)
        self.token_ids = array("I", token_ids[: self.inner.cached_len])
        return gained

    def absent(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return the pages that `adopt` cannot find."""
        return self.inner.absent(token_ids)

    def next_page(self, token_ids: Sequence[int]) -> bytes | None:
        """Return the digest of the next page to become full with these tokens."""
        return self.inner.next_page(token_ids)

    def reserve(self, span: TokenSpan, tree: ProposalTree) -> bool:
        """Allocate the memory of a step."""
        return self.inner.reserve(span, tree)

    def keep(self, path: Sequence[int]) -> None:
        """Keep the branch of accepted nodes; drop the rest of the tree."""
        self.inner.keep(path)
        self.token_ids.extend(self._tree.node(number).token_id for number in path)

    def contexts(self, step: SessionStep, order: int) -> Iterator[list[int]]:
        """Record that the step has been run; yield the last `order` tokens at the span's end and at each node."""
        self.token_ids.extend(step.span.token_ids)
        self._tree = step.tree
        history = list(self.token_ids[-order:])
        for number in range(len(step.tree) + 1 if step.wants_logits else 0):
            yield [*history, *(step.tree.node(node).token_id for node in step.tree.path(number))][-order:]
