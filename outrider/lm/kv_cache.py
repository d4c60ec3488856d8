"""The KV cache of one session: a table of pages, with a proposal tree pending on top.

A tree costs no masks and no copying back. The main line (the branch of first children) is written behind the span, as
if it were committed. Every other branch has a table of its own: the pages that it shares with the main line, and pages
of its own from the first position where it differs. In its table each node stands at its position, so a row's keys lie
as they would in a plain run, and keeping a branch means taking over its pages.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.lm.pages import PagePool, page_digest
from outrider.tokens import ROOT, ProposalTree, TokenSpan


class KVPoolFull(Exception):
    """The pool has no page left for a step that was not reserved."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows of a step that see the same table: those of the main line, or those that a side branch adds.

    Attributes:
        path: node numbers from a child of the root downwards.
        table: pages, in order of position.
        own_from: index of the first page that the main line does not share; the table's length for the main line.
        rows: indices within the step (span first, then nodes by number) of the rows computed here.
        positions: of these rows.
        writes: rows whose keys and values belong into the table's own pages, with their positions.
    """

    path: tuple[int, ...]
    table: tuple[int, ...]
    own_from: int
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class StepLayout:
    """Where the rows of a step stand, and what has to happen to pages before they are run.

    Attributes:
        span: the span.
        tree: the tree.
        num_nodes: its size when it was laid out.
        branches: the main line first.
        new_pages: pages that hold nothing yet, with their index in their table.
        copies: pages whose content is needed in another page too: (from, to).
    """

    span: TokenSpan
    tree: ProposalTree
    num_nodes: int
    branches: list[Branch] = field(default_factory=list)
    new_pages: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class PagedKVCache:
    """Which pages hold a session's keys and values; see the module.

    Invariant: the table has a page for every cached position, and none beyond while no step is laid out.

    Args:
        pool: the model's pages.
        salt: sessions share pages only with sessions of the same salt.
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
        """Tokens cached."""
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory of the pages held, in bytes; shared pages in full."""
        side_pages = sum(len(branch.table) - branch.own_from for branch in self._side_branches())
        return (len(self._table) + side_pages) * self._pool.page_bytes

    @property
    def is_current(self) -> bool:
        """Whether it was made since the pool's pages got their present meaning; see `PagePool.rename`."""
        return self._root == self._pool.root(self._salt)

    @property
    def table(self) -> tuple[int, ...]:
        """Pages in order of position."""
        return tuple(self._table)

    def fork(self, length: int) -> "PagedKVCache":
        """Returns another cache that holds the first `length` positions of this one; their pages are shared.

        Whichever of the two writes to a shared page first, copies it.
        """
        if length > self.cached_len:
            raise ValueError(f"{self.cached_len} positions are cached, not {length}")
        other = PagedKVCache(self._pool, self._salt)
        other._root = self._root
        # What a step that was laid out has yet to copy is taken from where it is now.
        copied_from = {to: source for source, to in self._layout.copies} if self._layout and not self._has_run else {}
        table = self._table[: self._pool.num_pages_for(length)]
        other._table = [copied_from.get(page, page) for page in table]
        other._token_ids = self._token_ids[:length]
        other._digests = self._digests[: length // self._pool.page_len]
        self._pool.share(other._table)
        return other

    def shared_bytes(self, length: int) -> int:
        """Returns the memory that a fork at a length goes on sharing: full pages. One that is not is copied."""
        return length // self._pool.page_len * self._pool.page_bytes

    def missing_bytes(self, length: int) -> int:
        """Returns the memory that caching `length` tokens would take beyond what is held."""
        return max(0, self._pool.num_pages_for(length) - len(self._table)) * self._pool.page_bytes

    def truncate(self, length: int) -> None:
        """Drops everything from position `length` on; pages that held nothing else go back to the pool."""
        self._forget_layout()
        del self._token_ids[length:]
        self._trim()

    def release(self) -> None:
        """Drops everything; by `adopt` it can be found again for as long as the memory is not needed."""
        self._forget_layout()
        self._tail_len = self.cached_len % self._pool.page_len
        if self._tail_len:
            tail = self._digest_after(self._token_ids, self._tail_len)
            self._pool.publish(self._table[-1], tail, is_full=False)
        self.truncate(0)

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Takes published pages that continue what is cached.

        Args:
            token_ids: of the session. The last one is never taken from a page: its logits are wanted.

        Returns:
            Tokens gained.
        """
        page_len, before = self._pool.page_len, self.cached_len
        while (len(self._digests) + 1) * page_len < len(token_ids):
            digest = self._digest_after(token_ids, page_len)
            page = self._pool.hold(digest)
            if page is None:
                break
            self.truncate(len(self._digests) * page_len)
            self._table.append(page)
            self._digests.append(digest)
            self._token_ids.extend(token_ids[len(self._token_ids) : len(self._digests) * page_len])
        self._adopt_tail(token_ids)
        return self.cached_len - before

    def absent(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Returns, of the full pages that `adopt` could take, the first that is not to be found and all behind it.

        Args:
            token_ids: of the session.

        Returns:
            Of each its index in the table and its digest.
        """
        page_len, digests = self._pool.page_len, self._digests
        parent, missing = digests[-1] if digests else self._root, list[tuple[int, bytes]]()
        for index in range(len(digests), (len(token_ids) - 1) // page_len):
            parent = page_digest(parent, token_ids[index * page_len : (index + 1) * page_len])
            if missing or not self._pool.is_published(parent):
                missing.append((index, parent))
        return missing

    def next_page(self, token_ids: Sequence[int]) -> bytes | None:
        """Returns the digest of the page that these tokens would fill next; None where they do not fill it."""
        if (len(self._digests) + 1) * self._pool.page_len > len(token_ids):
            return None
        return self._digest_after(token_ids, self._pool.page_len)

    def reserve(self, span: TokenSpan, tree: ProposalTree) -> bool:
        """Takes the pages that a step needs; False, and nothing is taken, where the pool has too few left."""
        self._forget_layout()
        layout = StepLayout(span, tree, len(tree))
        main = main_line(tree)
        if not self._extend_table(layout, span.start, span.end + len(main)):
            return False
        self._layout, self._has_run = layout, False
        layout.branches.append(self._main_branch(span, main))
        for path, fresh in _side_paths(tree, set(main)):
            branch = self._side_branch(layout, path, fresh, len(main))
            if branch is None:
                self._forget_layout()
                return False
            layout.branches.append(branch)
        return True

    def lay_out(self, span: TokenSpan, tree: ProposalTree) -> StepLayout:
        """Returns the layout of a step, reserving it if that has not been done.

        Raises:
            KVPoolFull: it was not reserved, and the pool has too few pages left.
        """
        layout = self._layout
        is_current = layout is not None and not self._has_run and layout.span == span
        reserved = is_current and layout is not None and layout.tree is tree and layout.num_nodes == len(tree)
        if not reserved and not self.reserve(span, tree):
            raise KVPoolFull(f"no pages left for {len(span.token_ids) + len(tree)} tokens")
        assert self._layout is not None
        return self._layout

    def note_run(self) -> None:
        """Learns that the step that was laid out has been run: its span is cached, its tree pending."""
        if self._layout is None:
            raise ValueError("no step was laid out")
        self._has_run = True
        self._extend_tokens(self._layout.span.token_ids)

    def keep(self, path: Sequence[int]) -> None:
        """Keeps the branch through these nodes (from a child of the root downwards) and drops the rest of the tree.

        Raises:
            ValueError: the last pass did not run such a branch.
        """
        layout = self._layout
        wanted = tuple(path)
        holding = [item for item in layout.branches if item.path[: len(wanted)] == wanted] if layout else []
        if layout is None or not self._has_run or not holding:
            if wanted:
                raise ValueError("the path has nodes that the last pass did not run")
            return
        # Of an accepted side branch the own pages replace the main line's.
        branch = holding[0]
        self._pool.drop(self._table[branch.own_from :])
        self._table[branch.own_from :] = branch.table[branch.own_from :]
        self._layout = None
        for other in layout.branches[1:]:
            if other is not branch:
                self._pool.drop(other.table[other.own_from :])
        self._extend_tokens([layout.tree.node(number).token_id for number in wanted])
        self._trim()

    def _adopt_tail(self, token_ids: Sequence[int]) -> None:
        """Takes back the page that was not full when this session rested, if it is still there."""
        start, tail_len = len(self._digests) * self._pool.page_len, self._tail_len
        self._tail_len = 0
        if self.cached_len == start and 0 < tail_len < len(token_ids) - start:
            page = self._pool.hold(self._digest_after(token_ids, tail_len))
            if page is not None:
                self._table.append(page)
                self._token_ids.extend(token_ids[start : start + tail_len])

    def _digest_after(self, token_ids: Sequence[int], num: int) -> bytes:
        """Returns the digest of a page with the `num` tokens that follow the full pages."""
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
        self._pool.drop(self._table[num:])
        del self._table[num:]

    def _side_branches(self) -> list[Branch]:
        return self._layout.branches[1:] if self._layout else []

    def _forget_layout(self) -> None:
        layout, self._layout = self._layout, None
        if layout is None:
            return
        for branch in layout.branches[1:]:
            self._pool.drop(branch.table[branch.own_from :])
        if not self._has_run:
            # A page of the table that was to be copied has no content yet.
            copied = [self._table.index(page) for _, page in layout.copies if page in self._table]
            del self._token_ids[min(copied, default=len(self._table)) * self._pool.page_len :]
        self._trim()

    def _extend_table(self, layout: StepLayout, start: int, end: int) -> bool:
        """Makes room for positions start .. end - 1: no page there is anyone else's, or findable."""
        page_len = self._pool.page_len
        first = start // page_len
        copied = first < len(self._table) and not self._pool.make_private(self._table[first])
        num_kept = len(self._table)
        pages = self._pool.take(self._pool.num_pages_for(end) - num_kept + copied)
        if pages is None:
            return False
        if copied:
            page = pages.pop()
            layout.copies.append((self._table[first], page))
            self._pool.drop([self._table[first]])
            self._table[first] = page
            layout.new_pages.append((page, first))
        layout.new_pages += [(page, num_kept + index) for index, page in enumerate(pages)]
        self._table += pages
        return True

    def _main_branch(self, span: TokenSpan, main: tuple[int, ...]) -> Branch:
        num_span = len(span.token_ids)
        rows = (*range(num_span), *(num_span + number - 1 for number in main))
        positions = tuple(range(span.start, span.end + len(main)))
        table = tuple(self._table)
        return Branch(main, table, len(table), rows, positions, tuple(zip(rows, positions, strict=True)))

    def _side_branch(
        self, layout: StepLayout, path: tuple[int, ...], fresh: tuple[int, ...], num_main: int
    ) -> Branch | None:
        span, page_len = layout.span, self._pool.page_len
        main = layout.branches[0].path
        num_shared = next(i for i, number in enumerate(path) if i >= num_main or main[i] != number)
        own_from = (span.end + num_shared) // page_len
        pages = self._pool.take(self._pool.num_pages_for(span.end + len(path)) - own_from)
        if pages is None:
            return None
        layout.new_pages += [(page, own_from + index) for index, page in enumerate(pages)]
        own_start = own_from * page_len
        if own_start < span.start:
            copied_from = {to: source for source, to in layout.copies}
            layout.copies.append((copied_from.get(self._table[own_from], self._table[own_from]), pages[0]))
        rows = [*range(len(span.token_ids)), *(len(span.token_ids) + number - 1 for number in path)]
        writes = [(row, span.start + index) for index, row in enumerate(rows) if span.start + index >= own_start]
        return Branch(
            path=path,
            table=(*self._table[:own_from], *pages),
            own_from=own_from,
            rows=tuple(len(span.token_ids) + number - 1 for number in fresh),
            positions=tuple(span.end + layout.tree.depth(number) - 1 for number in fresh),
            writes=tuple(writes),
        )


def main_line(tree: ProposalTree) -> tuple[int, ...]:
    """Returns the branch of first children, as node numbers."""
    line: list[int] = []
    children = tree.children(ROOT)
    while children:
        line.append(children[0])
        children = tree.children(children[0])
    return tuple(line)


def _side_paths(tree: ProposalTree, done: set[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the paths to the leaves off the main line, each with its nodes that no earlier path has."""
    paths = []
    for leaf in range(1, len(tree) + 1):
        if leaf not in done and not tree.children(leaf):
            path = tuple(tree.path(leaf))
            fresh = tuple(number for number in path if number not in done)
            done.update(fresh)
            paths.append((path, fresh))
    return paths
