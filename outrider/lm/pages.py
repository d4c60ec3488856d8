"""Pages of KV cache: which are free, who shares which, which can be had again. Bookkeeping only, without tensors.

A page holds `page_len` consecutive positions of a session on every layer. A full page is published under a digest of
everything that decides its bits: the model and its numerics, the salt, and all tokens up to its end. Whoever is about
to compute a page with that digest takes the published one instead. A page that nobody holds any more stays findable
until its memory is needed, the least recently used first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

SCRATCH_PAGE: Final = 0
"""Never handed out: tables are filled up with it, and what is written there is never read."""


@dataclass(frozen=True, slots=True)
class KVUsage:
    """How full a pool of pages is, and what sharing has saved.

    Attributes:
        page_len: positions a page.
        page_bytes: memory of a page, with what is kept beside it.
        num_pages: pages that can be held.
        num_held: pages that sessions hold; a shared page counts once.
        num_reusable: pages that nobody holds but that can be found again.
        num_hit_tokens: tokens whose keys and values were found instead of computed, since the start.
        num_evicted_pages: reusable pages whose memory was given to others, since the start.
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
        """Memory of the pages that sessions hold."""
        return self.num_held * self.page_bytes

    @property
    def max_len(self) -> int:
        """Longest session that fits, in tokens."""
        return self.num_pages * self.page_len


class PagePool:
    """All pages of one model. Not thread-safe: the engine's thread owns it.

    Args:
        num_pages: pages to hand out; their numbers are 1 .. num_pages.
        page_len: positions a page.
        page_bytes: memory of a page.
        root: names the model and its numerics; part of every digest.
    """

    def __init__(self, num_pages: int, page_len: int, page_bytes: int, root: bytes = b"") -> None:
        if num_pages < 1 or page_len < 1:
            raise ValueError(f"{num_pages} pages of {page_len} positions")
        self.page_len = page_len
        self.page_bytes = page_bytes
        self._num_pages = num_pages
        self._memory_bytes = num_pages * page_bytes
        self._beside_bytes = 0
        self._root = root
        # The page freed last is handed out first: its memory is warm, and pages never needed are never touched.
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
        """How full the pool is now."""
        return KVUsage(
            page_len=self.page_len,
            page_bytes=self.page_bytes + self._beside_bytes,
            num_pages=self._num_pages,
            num_held=len(self._holders),
            num_reusable=len(self._reusable),
            num_hit_tokens=self._num_hits * self.page_len,
            num_evicted_pages=self._num_evicted,
        )

    def root(self, salt: bytes) -> bytes:
        """Returns the digest that the first page of a session with this salt continues."""
        return hashlib.sha256(len(salt).to_bytes(4, "big") + salt + self._root).digest()

    def rename(self, rename: Callable[[bytes], bytes]) -> None:
        """Changes what the pages published from now on stand for; those published before are not found any more.

        Args:
            rename: returns the new name of model and numerics for the present one.
        """
        self._root = rename(self._root)

    def num_pages_beside(self, num_bytes: int) -> int:
        """Returns how many pages the pool's memory holds with so many bytes kept beside each."""
        return self._memory_bytes // (self.page_bytes + num_bytes)

    def keep_beside(self, num_bytes: int) -> None:
        """Counts bytes that are kept beside each page in the pool's memory: from now on fewer pages are handed out.

        Those with the highest numbers are given up; what sessions hold of them, once they are dropped. Memory that was
        written to before stays with the process.
        """
        self._beside_bytes = num_bytes
        self._num_pages = max(1, self.num_pages_beside(num_bytes))
        self._free = [page for page in self._free if page <= self._num_pages]
        for page in [page for page in self._reusable if page > self._num_pages]:
            del self._reusable[page]
            self._withdraw(page)

    def num_pages_for(self, length: int) -> int:
        """Returns how many pages `length` positions take."""
        return -(-length // self.page_len)

    def take(self, num: int) -> list[int] | None:
        """Returns pages of one's own, each held once; None, and nothing changes, where there are not as many."""
        if num > self._num_pages - len(self._holders):
            return None
        pages = [self._one() for _ in range(num)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def hold(self, digest: bytes) -> int | None:
        """Returns the page that is published under the digest, held once more; None where there is none."""
        page = self._published.get(digest)
        if page is not None:
            self._holders[page] = self._holders.get(page, 0) + 1
            self._reusable.pop(page, None)
            self._num_hits += 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Holds the pages of a table, which somebody holds, once more."""
        for page in pages:
            self._holders[page] += 1

    def is_published(self, digest: bytes) -> bool:
        """Whether `hold` would find a page."""
        return digest in self._published

    def drop(self, pages: Sequence[int]) -> None:
        """Ends one holding of each page of a table; the pages at its end are the first to be reused."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page > self._num_pages:
                self._withdraw(page)
            elif page in self._digests:
                self._reusable[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, digest: bytes, *, is_full: bool = True) -> None:
        """Makes a page findable, unless another with the same bits is."""
        if digest not in self._published and page not in self._digests:
            self._published[digest] = page
            self._digests[page] = digest
            if is_full and self._fresh is not None:
                self._fresh[page] = digest

    def track(self) -> None:
        """Remembers from now on which full pages are published, for `take_fresh`."""
        self._fresh = {}

    def take_fresh(self) -> list[tuple[int, bytes]]:
        """Returns the full pages published since the last call, with their digests, that still hold what they did."""
        fresh = {} if self._fresh is None else self._fresh
        found = [(page, digest) for page, digest in fresh.items() if self._digests.get(page) == digest]
        fresh.clear()
        return found

    def fill(self, digest: bytes) -> int | None:
        """Publishes a page that is about to be filled with what the digest stands for, held by nobody.

        Returns:
            The page; None where the digest is published already, or no memory is left that nobody holds.
        """
        if digest in self._published or (pages := self.take(1)) is None:
            return None
        self._published[digest] = pages[0]
        self._digests[pages[0]] = digest
        self.drop(pages)
        return pages[0]

    def make_private(self, page: int) -> bool:
        """Withdraws a page that is about to be written to; False where others hold it too: it has to be copied."""
        if self._holders[page] > 1:
            return False
        self._withdraw(page)
        return True

    def _one(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_touched < self._num_pages:
            self._num_touched += 1
            return self._num_touched
        page, _ = self._reusable.popitem(last=False)
        self._withdraw(page)
        self._num_evicted += 1
        return page

    def _withdraw(self, page: int) -> None:
        digest = self._digests.pop(page, None)
        if digest is not None:
            del self._published[digest]


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the digest of the page that holds these tokens and continues the page of digest `parent`."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()
