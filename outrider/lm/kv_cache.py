"""The KV cache of one session: a page table, and the pending branches of a proposal tree.

A proposal tree needs no attention masks, and accepting a branch copies nothing. The main line (the branch of first
children) is written after the span, as if it were committed. Each other branch has a page table of its own: the pages
that it shares with the main line, and own pages from the first position where it differs. Each node is stored at its
session position in the table, as in plain decoding, so that accepting a branch means replacing pages of the table.
"""

from array import array
from collections.abc import Sequence

from outrider.lm.pages import PagePool, page_digest
from outrider.lm.step_layout import Branch, PageCopy, StepLayout, main_branch, main_line, side_branch, side_paths
from outrider.tokens import ProposalTree, TokenSpan


class KVPoolFull(Exception):
    """The pool has too few free pages for a step that was not reserved."""


class PagedKVCache:
    """The page table of one session; see the module.

    Invariant: while no step is laid out, the table has exactly the pages of the cached positions.

    Args:
        pool: page pool of the model.
        salt: cache salt; only sessions with the same salt share pages.
    """

    def __init__(self, pool: PagePool, salt: bytes = b"") -> None:
        self._pool = pool
        self._salt = salt
        self._root = pool.root(salt)
        self._table: list[int] = []
        self._token_ids = array("I")
        self._digests: list[bytes] = []
        self._tail_len = 0
        self._layout: StepLayout | None = None
        self._has_run = False

    @property
    def cached_len(self) -> int:
        """Number of cached tokens."""
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory of the session's pages, in bytes; shared pages count in full."""
        side_pages = sum(len(branch.table) - branch.own_from for branch in self._side_branches())
        return (len(self._table) + side_pages) * self._pool.page_bytes

    @property
    def is_current(self) -> bool:
        """Whether the cache was created after the last `PagePool.rename`: its pages have all stored features."""
        return self._root == self._pool.root(self._salt)

    @property
    def table(self) -> tuple[int, ...]:
        """Page numbers in order of position."""
        return tuple(self._table)

    def fork(self, length: int) -> "PagedKVCache":
        """Return a new cache with the first `length` positions of this one, in shared pages (copy-on-write).

        Raises:
            ValueError: fewer than `length` positions are cached.
        """
        if length > self.cached_len:
            raise ValueError(f"{self.cached_len} positions are cached, not {length}")
        other = PagedKVCache(self._pool, self._salt)
        other._root = self._root
        # Pages that a step has not copied yet are shared at their source.
        copied_from = _sources(self._layout.copies) if self._layout and not self._has_run else {}
        table = self._table[: self._pool.num_pages_for(length)]
        other._table = [copied_from.get(page, page) for page in table]
        other._token_ids = self._token_ids[:length]
        other._digests = self._digests[: length // self._pool.page_len]
        self._pool.share(other._table)
        return other

    def shared_bytes(self, length: int) -> int:
        """Return the memory, in bytes, that a fork at `length` shares permanently: that of full pages."""
        return length // self._pool.page_len * self._pool.page_bytes

    def missing_bytes(self, length: int) -> int:
        """Return the additional memory, in bytes, for `length` cached tokens."""
        return max(0, self._pool.num_pages_for(length) - len(self._table)) * self._pool.page_bytes

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on, and free the pages that hold no other positions."""
        self._forget_layout()
        del self._token_ids[length:]
        self._trim()

    def release(self) -> None:
        """Drop all positions; `adopt` can restore them until their pages are evicted."""
        self._forget_layout()
        self._tail_len = self.cached_len % self._pool.page_len
        if self._tail_len:
            tail = self._digest_after(self._token_ids, self._tail_len)
            self._pool.publish(self._table[-1], tail, is_full=False)
        self.truncate(0)

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Extend the cache with prefix-cache hits.

        Args:
            token_ids: token ids of the session. The last one is never a hit, because its logits must be computed.

        Returns:
            Number of tokens added.
        """
        page_len, before = self._pool.page_len, self.cached_len
        while (len(self._digests) + 1) * page_len < len(token_ids):
            digest = self._digest_after(token_ids, page_len)
            page = self._pool.acquire(digest)
            if page is None:
                break
            self.truncate(len(self._digests) * page_len)
            self._table.append(page)
            self._digests.append(digest)
            self._token_ids.extend(token_ids[len(self._token_ids) : len(self._digests) * page_len])
        self._adopt_tail(token_ids)
        return self.cached_len - before

    def absent(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return the full pages that `adopt` cannot find: the first miss and all pages after it.

        Args:
            token_ids: token ids of the session.

        Returns:
            Index in the table and digest of each.
        """
        page_len, digests = self._pool.page_len, self._digests
        parent, missing = digests[-1] if digests else self._root, list[tuple[int, bytes]]()
        for index in range(len(digests), (len(token_ids) - 1) // page_len):
            parent = page_digest(parent, token_ids[index * page_len : (index + 1) * page_len])
            if missing or not self._pool.is_published(parent):
                missing.append((index, parent))
        return missing

    def next_page(self, token_ids: Sequence[int]) -> bytes | None:
        """Return the digest of the next page to become full with these tokens; None if they do not fill it."""
        if (len(self._digests) + 1) * self._pool.page_len > len(token_ids):
            return None
        return self._digest_after(token_ids, self._pool.page_len)

    def reserve(self, span: TokenSpan, tree: ProposalTree) -> bool:
        """Allocate the pages of a step; return False, without a change, if the pool has too few free pages."""
        self._forget_layout()
        layout = StepLayout(span, tree, len(tree))
        main = main_line(tree)
        if not self._extend_table(layout, span.start, span.end + len(main)):
            return False
        self._layout, self._has_run = layout, False
        layout.branches.append(main_branch(span, main, tuple(self._table)))
        for path, fresh in side_paths(tree, set(main)):
            branch = self._side_branch(layout, path, fresh, len(main))
            if branch is None:
                self._forget_layout()
                return False
            layout.branches.append(branch)
        return True

    def lay_out(self, span: TokenSpan, tree: ProposalTree) -> StepLayout:
        """Return the layout of a step; reserve its pages first if that was not done.

        Raises:
            KVPoolFull: the step was not reserved, and the pool has too few free pages.
        """
        layout = self._layout
        is_current = layout is not None and not self._has_run and layout.span == span
        reserved = is_current and layout is not None and layout.tree is tree and layout.num_nodes == len(tree)
        if not reserved and not self.reserve(span, tree):
            raise KVPoolFull(f"too few free pages for {len(span.token_ids) + len(tree)} tokens")
        assert self._layout is not None
        return self._layout

    def mark_run(self) -> None:
        """Record that the step that was laid out has been run: its span is cached, its tree pending.

        Raises:
            ValueError: no step was laid out.
        """
        if self._layout is None:
            raise ValueError("no step was laid out")
        self._has_run = True
        self._free_copied(self._layout)
        self._extend_tokens(self._layout.span.token_ids)

    def keep(self, path: Sequence[int]) -> None:
        """Keep the branch of an accepted path and drop the rest of the pending tree.

        Args:
            path: numbers of the accepted nodes, from a child of the root downwards.

        Raises:
            ValueError: the last pass did not run this path.
        """
        layout = self._layout
        wanted = tuple(path)
        holding = [item for item in layout.branches if item.path[: len(wanted)] == wanted] if layout else []
        if layout is None or not self._has_run or not holding:
            if wanted:
                raise ValueError("the path has nodes that the last pass did not run")
            return
        # The own pages of an accepted side branch replace those of the main line.
        branch = holding[0]
        self._pool.free(self._table[branch.own_from :])
        self._table[branch.own_from :] = branch.table[branch.own_from :]
        self._layout = None
        for other in layout.branches[1:]:
            if other is not branch:
                self._pool.free(other.table[other.own_from :])
        self._extend_tokens([layout.tree.node(number).token_id for number in wanted])
        self._trim()

    def _adopt_tail(self, token_ids: Sequence[int]) -> None:
        """Restore the partly filled last page that `release` published, if it was not evicted."""
        start, tail_len = len(self._digests) * self._pool.page_len, self._tail_len
        self._tail_len = 0
        if self.cached_len == start and 0 < tail_len < len(token_ids) - start:
            page = self._pool.acquire(self._digest_after(token_ids, tail_len))
            if page is not None:
                self._table.append(page)
                self._token_ids.extend(token_ids[start : start + tail_len])

    def _digest_after(self, token_ids: Sequence[int], num: int) -> bytes:
        """Return the digest of a page with the `num` tokens after the full pages."""
        start = len(self._digests) * self._pool.page_len
        parent = self._digests[-1] if self._digests else self._root
        return page_digest(parent, token_ids[start : start + num])

    def _extend_tokens(self, token_ids: Sequence[int]) -> None:
        self._token_ids.extend(token_ids)
        while (digest := self.next_page(self._token_ids)) is not None:
            self._pool.publish(self._table[len(self._digests)], digest)
            self._digests.append(digest)

    def _trim(self) -> None:
        del self._digests[self.cached_len // self._pool.page_len :]
        num = self._pool.num_pages_for(self.cached_len)
        self._pool.free(self._table[num:])
        del self._table[num:]

    def _side_branches(self) -> list[Branch]:
        return self._layout.branches[1:] if self._layout else []

    def _forget_layout(self) -> None:
        layout, self._layout = self._layout, None
        if layout is None:
            return
        self._free_copied(layout)
        for branch in layout.branches[1:]:
            self._pool.free(branch.table[branch.own_from :])
        if not self._has_run:
            # The destination page of a copy that was not run has no content.
            copied = [self._table.index(copy.target) for copy in layout.copies if copy.target in self._table]
            del self._token_ids[min(copied, default=len(self._table)) * self._pool.page_len :]
        self._trim()

    def _free_copied(self, layout: StepLayout) -> None:
        self._pool.free(layout.held_pages)
        layout.held_pages.clear()

    def _extend_table(self, layout: StepLayout, start: int, end: int) -> bool:
        """Extend the table to `end`; make the page of `start` private, as it is about to be written."""
        page_len = self._pool.page_len
        first = start // page_len
        copied = first < len(self._table) and not self._pool.make_private(self._table[first])
        num_kept = len(self._table)
        pages = self._pool.allocate(self._pool.num_pages_for(end) - num_kept + copied)
        if pages is None:
            return False
        if copied:
            page = pages.pop()
            layout.copies.append(PageCopy(self._table[first], page, start % page_len))
            # Not freed yet: another session of the pass might be given it, and write to it first.
            layout.held_pages.append(self._table[first])
            self._table[first] = page
            layout.new_pages.append(page)
        layout.new_pages += pages
        self._table += pages
        return True

    def _side_branch(
        self, layout: StepLayout, path: tuple[int, ...], fresh: tuple[int, ...], num_main: int
    ) -> Branch | None:
        span, page_len = layout.span, self._pool.page_len
        main = layout.branches[0].path
        num_shared = next(i for i, number in enumerate(path) if i >= num_main or main[i] != number)
        own_from = (span.end + num_shared) // page_len
        pages = self._pool.allocate(self._pool.num_pages_for(span.end + len(path)) - own_from)
        if pages is None:
            return None
        layout.new_pages += pages
        if own_from * page_len < span.start:
            shared = self._table[own_from]
            source = _sources(layout.copies).get(shared, shared)
            layout.copies.append(PageCopy(source, pages[0], span.start - own_from * page_len))
        return side_branch(layout, path, fresh, (*self._table[:own_from], *pages), own_from, page_len)


def _sources(copies: Sequence[PageCopy]) -> dict[int, int]:
    """Return the page that each target is copied from."""
    return {copy.target: copy.source for copy in copies}
