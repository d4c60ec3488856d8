"""A pool of KV cache pages shared by all sessions of a process, with prefix caching. Bookkeeping only, without tensors.

A page has `page_len` consecutive positions of a session on every layer. A full page is published under a digest of
everything that determines its bits: the model and its numerics, the cache salt, and all tokens up to its end. A session
that needs a page with this digest uses the published one instead of computing it. Pages are reference-counted; a
published page without references stays in the prefix cache until it is evicted, least recently used first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

SCRATCH_PAGE: Final = 0
"""A page that is never allocated: tables are padded with it, and its content is never used."""


@dataclass(frozen=True, slots=True)
class KVUsage:
    """The occupancy of a page pool, and counters of its prefix cache.

    Attributes:
        page_len: positions per page.
        page_bytes: memory of a page, in bytes, its features included.
        num_pages: pages that can be allocated.
        num_held: pages in use by sessions; a shared page counts once.
        num_reusable: pages that no session uses but that are in the prefix cache.
        num_hit_tokens: prefix-cache hits since the start, in tokens.
        num_evicted_pages: evictions from the prefix cache since the start.
    """

    page_len: int
    page_bytes: int
    num_pages: int
    num_held: int
    num_reusable: int
    num_hit_tokens: int
    num_evicted_pages: int

    @property
    def used_bytes(self) -> int:
        """Memory of the pages in use by sessions, in bytes."""
        return self.num_held * self.page_bytes

    @property
    def max_len(self) -> int:
        """Longest session that fits into the pool, in tokens."""
        return self.num_pages * self.page_len


class PagePool:
    """All pages of one model. Not thread-safe: only the engine's thread may call it.

    Args:
        num_pages: pages to allocate, at least 1; their numbers are 1 .. num_pages.
        page_len: positions per page.
        page_bytes: memory of a page, in bytes.
        root: identity of the model and its numerics, which is part of every digest.
    """

    def __init__(self, num_pages: int, page_len: int, page_bytes: int, root: bytes = b"") -> None:
        if num_pages < 1 or page_len < 1:
            raise ValueError(f"num_pages is {num_pages} and page_len {page_len}, both must be at least 1")
        self.page_len = page_len
        self.page_bytes = page_bytes
        self._num_pages = num_pages
        self._memory_bytes = num_pages * page_bytes
        self._extra_bytes = 0
        self._root = root
        # The page freed last is allocated first: its memory is in the CPU cache, and pages that were never used
        # take no memory, but for the next ones (`prefault`).
        self._free: list[int] = []
        self._num_touched = 0
        self._holders: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._num_hits = 0
        self._num_evicted = 0
        self._fresh: dict[int, bytes] | None = None

    @property
    def usage(self) -> KVUsage:
        """The current occupancy of the pool."""
        return KVUsage(
            page_len=self.page_len,
            page_bytes=self.page_bytes + self._extra_bytes,
            num_pages=self._num_pages,
            num_held=len(self._holders),
            num_reusable=len(self._reusable),
            num_hit_tokens=self._num_hits * self.page_len,
            num_evicted_pages=self._num_evicted,
        )

    def root(self, salt: bytes) -> bytes:
        """Return the parent digest of the first page of a session with this salt."""
        return hashlib.sha256(len(salt).to_bytes(4, "big") + salt + self._root).digest()

    def rename(self, rename: Callable[[bytes], bytes]) -> None:
        """Change the identity that is part of every digest; pages published before are not found any more.

        Args:
            rename: returns the new identity of the model and its numerics for the current one.
        """
        self._root = rename(self._root)

    def num_pages_with_extra(self, num_bytes: int) -> int:
        """Return how many pages fit into the pool's memory with `num_bytes` of additional data per page."""
        return self._memory_bytes // (self.page_bytes + num_bytes)

    def set_extra_bytes(self, num_bytes: int) -> None:
        """Set the size of the additional data of each page, which reduces the number of pages in the pool's memory.

        The pages with the highest numbers are removed; those in use, once they are freed. Memory that was written to
        before is not returned to the system.
        """
        self._extra_bytes = num_bytes
        self._num_pages = max(1, self.num_pages_with_extra(num_bytes))
        self._free = [page for page in self._free if page <= self._num_pages]
        for page in [page for page in self._reusable if page > self._num_pages]:
            del self._reusable[page]
            self._unpublish(page)

    def num_pages_for(self, length: int) -> int:
        """Return the number of pages of `length` positions."""
        return -(-length // self.page_len)

    def allocate(self, num: int) -> list[int] | None:
        """Allocate `num` pages with one reference each; return None, without a change, if too few are free."""
        if num > self._num_pages - len(self._holders):
            return None
        pages = [self._allocate_one() for _ in range(num)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def acquire(self, digest: bytes) -> int | None:
        """Add a reference to the page that is published under the digest and return it; None if there is none."""
        page = self._published.get(digest)
        if page is not None:
            self._holders[page] = self._holders.get(page, 0) + 1
            self._reusable.pop(page, None)
            self._num_hits += 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page of a table; all must be in use."""
        for page in pages:
            self._holders[page] += 1

    def is_published(self, digest: bytes) -> bool:
        """Return whether `acquire` would find a page."""
        return digest in self._published

    def free(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page of a table; the pages at its end are evicted first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page > self._num_pages:
                self._unpublish(page)
            elif page in self._digests:
                self._reusable[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, digest: bytes, *, is_full: bool = True) -> None:
        """Add a page to the prefix cache, unless one with the same digest is in it."""
        if digest not in self._published and page not in self._digests:
            self._published[digest] = page
            self._digests[page] = digest
            if is_full and self._fresh is not None:
                self._fresh[page] = digest

    def track(self) -> None:
        """Record full pages that are published from now on, for `take_fresh`."""
        self._fresh = {}

    def take_fresh(self) -> list[tuple[int, bytes]]:
        """Return the full pages, with their digests, that were published since the last call and not overwritten."""
        fresh = {} if self._fresh is None else self._fresh
        found = [(page, digest) for page, digest in fresh.items() if self._digests.get(page) == digest]
        fresh.clear()
        return found

    def fill(self, digest: bytes) -> int | None:
        """Allocate a page for restored content and publish it under its digest, without references.

        Returns:
            The page, which the caller must fill; None if the digest is published already, or no page is free.
        """
        if digest in self._published or (pages := self.allocate(1)) is None:
            return None
        self._published[digest] = pages[0]
        self._digests[pages[0]] = digest
        self.free(pages)
        return pages[0]

    def make_private(self, page: int) -> bool:
        """Unpublish a page before it is written; return False if it is shared, so that it must be copied instead."""
        if self._holders[page] > 1:
            return False
        self._unpublish(page)
        return True

    def _allocate_one(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_touched < self._num_pages:
            self._num_touched += 1
            return self._num_touched
        page, _ = self._reusable.popitem(last=False)
        self._unpublish(page)
        self._num_evicted += 1
        return page

    def _unpublish(self, page: int) -> None:
        digest = self._digests.pop(page, None)
        if digest is not None:
            del self._published[digest]


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the SHA-256 digest of a page with these token ids after the page with digest `parent`."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()
