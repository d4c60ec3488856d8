"""The layout of a step: its branches, their page tables and rows, and the pages to prepare."""

from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.tokens import ROOT, ProposalTree, TokenSpan


@dataclass(frozen=True, slots=True)
class Branch:
    """The rows of a step with the same page table: those of the main line, or those that a side branch adds.

    Attributes:
        path: node numbers from a child of the root downwards.
        table: page numbers in order of position.
        own_from: index of the first page not shared with the main line; the table's length for the main line.
        rows: indices within the step (span first, then nodes by number) of the rows of this branch.
        positions: session positions of these rows.
        writes: (row, position) of each row whose keys and values are written to the branch's own pages.
    """

    path: tuple[int, ...]
    table: tuple[int, ...]
    own_from: int
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]


class PageCopy(NamedTuple):
    """The copy of a page whose first positions a branch has from another page, before it writes the others.

    Attributes:
        source: page to copy from.
        target: page to copy to.
        length: number of positions to copy.
    """

    source: int
    target: int
    length: int


@dataclass(slots=True)
class StepLayout:
    """The layout of a step: its branches, and the pages to prepare before it is run.

    Attributes:
        span: span of committed tokens.
        tree: proposal tree below the span's last token.
        num_nodes: size of the tree when it was laid out.
        branches: branches of the tree, the main line first.
        new_pages: newly allocated pages.
        copies: pages to copy.
        held_pages: those of the sources that the session has left, and holds until they have been copied.
    """

    span: TokenSpan
    tree: ProposalTree
    num_nodes: int
    branches: list[Branch] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    held_pages: list[int] = field(default_factory=list)


def main_branch(span: TokenSpan, main: tuple[int, ...], table: tuple[int, ...]) -> Branch:
    """Return the branch of the span and the main line.

    Args:
        span: span of the step.
        main: node numbers of the main line.
        table: page table up to the main line's end.
    """
    num_span = len(span.token_ids)
    rows = (*range(num_span), *(num_span + number - 1 for number in main))
    positions = tuple(range(span.start, span.end + len(main)))
    return Branch(main, table, len(table), rows, positions, tuple(zip(rows, positions, strict=True)))


def side_branch(
    layout: StepLayout,
    path: tuple[int, ...],
    fresh: tuple[int, ...],
    table: tuple[int, ...],
    own_from: int,
    page_len: int,
) -> Branch:
    """Return the branch of a path off the main line.

    Args:
        layout: layout of the step.
        path: node numbers from a child of the root downwards.
        fresh: nodes of the path that no earlier branch has.
        table: page table of the branch.
        own_from: index of the first page not shared with the main line.
        page_len: positions per page.
    """
    span, num_span = layout.span, len(layout.span.token_ids)
    own_start = own_from * page_len
    rows = [*range(num_span), *(num_span + number - 1 for number in path)]
    return Branch(
        path=path,
        table=table,
        own_from=own_from,
        rows=tuple(num_span + number - 1 for number in fresh),
        positions=tuple(span.end + layout.tree.depth(number) - 1 for number in fresh),
        writes=tuple((row, span.start + index) for index, row in enumerate(rows) if span.start + index >= own_start),
    )


def main_line(tree: ProposalTree) -> tuple[int, ...]:
    """Return the node numbers of the branch of first children."""
    line: list[int] = []
    children = tree.children(ROOT)
    while children:
        line.append(children[0])
        children = tree.children(children[0])
    return tuple(line)


def side_paths(tree: ProposalTree, done: set[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the paths to the leaves off the main line, each with those of its nodes that no earlier path has."""
    paths = []
    for leaf in range(1, len(tree) + 1):
        if leaf not in done and not tree.children(leaf):
            path = tuple(tree.path(leaf))
            fresh = tuple(number for number in path if number not in done)
            done.update(fresh)
            paths.append((path, fresh))
    return paths
