"""A session's page table: spans, trees, sharing, copy-on-write, and no leaked pages."""

import random

import pytest

from outrider.lm.kv_cache import KVPoolFull, PagedKVCache
from outrider.lm.pages import PagePool
from outrider.lm.step_layout import main_line
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan
from tests.proposals import chain

PAGE_LEN = 4
EMPTY = ProposalTree()


class Memory:
    """The content of each slot, written as by a model, with token and position in place of keys and values."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, PAGE_LEN, page_bytes=1)
        self.slots: dict[int, tuple[int, int]] = {}

    def run(self, cache: PagedKVCache, span: TokenSpan, tree: ProposalTree = EMPTY) -> None:
        layout = cache.lay_out(span, tree)
        for page in layout.new_pages:
            for offset in range(PAGE_LEN):
                self.slots.pop(page * PAGE_LEN + offset, None)
        for source, target, length in layout.copies:
            for offset in range(length):
                if source * PAGE_LEN + offset in self.slots:
                    self.slots[target * PAGE_LEN + offset] = self.slots[source * PAGE_LEN + offset]
        tokens = [*span.token_ids, *(node.token_id for node in tree.nodes)]
        for branch in layout.branches:
            for row, position in branch.writes:
                self.slots[_slot(branch.table, position)] = (tokens[row], position)
        for branch in layout.branches:
            whole = [*span.token_ids, *(tree.node(number).token_id for number in branch.path)]
            for position, token_id in enumerate(whole, start=span.start):
                assert self.slots[_slot(branch.table, position)] == (token_id, position)
        cache.mark_run()

    def tokens(self, cache: PagedKVCache) -> list[int]:
        found = [self.slots[_slot(cache.table, position)] for position in range(cache.cached_len)]
        assert [position for _, position in found] == list(range(cache.cached_len))
        return [token_id for token_id, _ in found]


def _slot(table: tuple[int, ...], position: int) -> int:
    return table[position // PAGE_LEN] * PAGE_LEN + position % PAGE_LEN


def _span(start: int, *token_ids: int) -> TokenSpan:
    return TokenSpan(start, token_ids)


def _tree(*edges: tuple[int, int]) -> ProposalTree:
    tree = ProposalTree()
    for parent, token_id in edges:
        tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree


def test_spans_cross_pages_and_truncation_frees_them() -> None:
    memory = Memory(8)
    cache = PagedKVCache(memory.pool)
    memory.run(cache, TokenSpan(0, tuple(range(10))))
    assert (memory.tokens(cache), cache.num_bytes) == (list(range(10)), 3)
    cache.truncate(4)
    assert (cache.cached_len, memory.pool.usage.num_held) == (4, 1)
    memory.run(cache, _span(4, 77))
    assert memory.tokens(cache) == [0, 1, 2, 3, 77]
    assert cache.missing_bytes(9) == 1


@pytest.mark.parametrize(
    ("path", "expected"),
    [((), []), ((1,), [101]), ((1, 2), [101, 102]), ((3,), [103]), ((3, 4), [103, 104]), ((1, 5), [101, 105])],
)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8])
def test_keep_takes_the_accepted_branch_over(length: int, path: tuple[int, ...], expected: list[int]) -> None:
    # Nodes: 1 - 2 is the main line; 3 - 4 another branch from the root; 5 another child of 1.
    tree = _tree((0, 101), (1, 102), (0, 103), (3, 104), (1, 105))
    memory = Memory(16)
    cache = PagedKVCache(memory.pool)
    memory.run(cache, TokenSpan(0, tuple(range(length - 1))) if length > 1 else _span(0, 0), EMPTY)
    cache.truncate(length - 1)
    memory.run(cache, _span(length - 1, length - 1), tree)
    cache.keep(path)
    assert memory.tokens(cache) == [*range(length), *expected]
    assert memory.pool.usage.num_held == memory.pool.num_pages_for(cache.cached_len)


def test_keep_refuses_nodes_that_were_not_run() -> None:
    memory = Memory(4)
    cache = PagedKVCache(memory.pool)
    memory.run(cache, _span(0, 1), chain((5,)))
    with pytest.raises(ValueError, match="did not run"):
        cache.keep((2,))
    cache.keep((1,))
    with pytest.raises(ValueError, match="did not run"):
        cache.keep((1,))


def test_sessions_share_full_pages_but_for_the_last_token() -> None:
    memory = Memory(8)
    first, second = PagedKVCache(memory.pool), PagedKVCache(memory.pool)
    tokens = tuple(range(8))
    memory.run(first, TokenSpan(0, tokens))
    assert second.adopt(tokens) == 4  # the last token must be run for its logits
    assert second.adopt((*tokens, 9)) == 4
    assert memory.pool.usage.num_held == 2
    memory.run(second, _span(8, 9))
    assert memory.tokens(second) == [*tokens, 9]
    assert memory.pool.usage.num_held == 3


def test_another_salt_shares_nothing() -> None:
    memory = Memory(8)
    memory.run(PagedKVCache(memory.pool, b"a"), TokenSpan(0, tuple(range(8))))
    assert PagedKVCache(memory.pool, b"b").adopt(range(9)) == 0
    assert PagedKVCache(memory.pool, b"a").adopt(range(9)) == 8


def test_a_shared_page_is_copied_before_it_is_written_to() -> None:
    memory = Memory(8)
    first, second = PagedKVCache(memory.pool), PagedKVCache(memory.pool)
    memory.run(first, TokenSpan(0, tuple(range(8))))
    second.adopt(range(9))
    second.truncate(6)
    memory.run(second, _span(6, 60), _tree((0, 61), (0, 62)))
    second.keep((2,))
    assert memory.tokens(second) == [0, 1, 2, 3, 4, 5, 60, 62]
    assert memory.tokens(first) == list(range(8))
    first.release()
    second.release()
    assert memory.pool.usage.num_held == 0


def test_a_page_that_is_to_be_copied_is_nobody_elses_until_the_pass_has_run() -> None:
    memory = Memory(4)
    first, second, third = (PagedKVCache(memory.pool) for _ in range(3))
    memory.run(first, _span(0, 1, 2, 3, 4, 5, 6))
    copying = first.fork(6)
    # As a scheduler does: the steps of a pass are reserved before any is run, and other sessions make room for them.
    assert copying.reserve(_span(6, 7), EMPTY)
    first.release()
    assert second.reserve(_span(0, 21, 22, 23, 24), EMPTY)
    if third.reserve(_span(0, 31), EMPTY):
        memory.run(third, _span(0, 31))
    memory.run(second, _span(0, 21, 22, 23, 24))
    memory.run(copying, _span(6, 7))
    assert memory.tokens(copying) == [1, 2, 3, 4, 5, 6, 7]
    assert third.reserve(_span(0, 31), EMPTY)
    for cache in (copying, second, third):
        cache.release()
    assert memory.pool.usage.num_held == 0


def test_a_page_that_was_to_be_copied_and_was_not_is_not_trusted() -> None:
    memory = Memory(3)
    first, second = PagedKVCache(memory.pool), PagedKVCache(memory.pool)
    memory.run(first, TokenSpan(0, tuple(range(8))))
    second.adopt(range(9))
    second.truncate(6)
    assert not second.reserve(_span(6, 60), _tree((0, 61), (0, 62), (0, 63)))
    assert second.cached_len <= 4
    assert memory.tokens(second) == list(range(second.cached_len))


def test_released_tokens_are_found_again_with_their_unfilled_page() -> None:
    memory = Memory(8)
    cache = PagedKVCache(memory.pool)
    memory.run(cache, TokenSpan(0, tuple(range(6))))
    cache.release()
    assert (cache.cached_len, memory.pool.usage.num_held, memory.pool.usage.num_reusable) == (0, 0, 2)
    assert cache.adopt(range(7)) == 6
    memory.run(cache, _span(6, 6, 7, 8))
    assert memory.tokens(cache) == list(range(9))
    cache.release()
    assert cache.adopt([*range(8), 99, 100]) == 8  # a different token in the partly filled page


def test_a_full_pool_refuses_and_takes_nothing() -> None:
    memory = Memory(3)
    cache = PagedKVCache(memory.pool)
    memory.run(cache, TokenSpan(0, tuple(range(8))))
    assert not cache.reserve(_span(8, 1, 2, 3, 4, 5), EMPTY)
    assert memory.pool.usage.num_held == 2
    with pytest.raises(KVPoolFull):
        cache.lay_out(_span(8, 1, 2, 3, 4, 5), EMPTY)
    assert cache.reserve(_span(8, 1), EMPTY)
    assert not cache.reserve(_span(8, 1), _tree((0, 5), (0, 6)))
    assert memory.pool.usage.num_held == 2


def test_a_tree_that_grew_is_laid_out_again() -> None:
    memory = Memory(8)
    cache = PagedKVCache(memory.pool)
    tree = chain((1, 2))
    assert cache.reserve(_span(0, 0), tree)
    tree.append(ProposalNode(2, 3, NodeKind.GUESSED))
    memory.run(cache, _span(0, 0), tree)
    cache.keep((1, 2, 3))
    assert memory.tokens(cache) == [0, 1, 2, 3]


def test_main_line_is_the_branch_of_first_children() -> None:
    assert main_line(_tree((0, 7), (0, 8), (2, 9), (1, 5), (4, 6))) == (1, 4, 5)
    assert main_line(EMPTY) == ()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_every_session_right_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory(40)
    caches = [PagedKVCache(memory.pool) for _ in range(4)]
    known: list[list[int]] = [[] for _ in caches]
    for _ in range(150):
        index = rng.randrange(len(caches))
        cache, tokens = caches[index], known[index]
        match rng.choice(["run", "run", "run", "truncate", "release", "adopt"]):
            case "run":
                start = cache.cached_len
                del tokens[start:]
                span = TokenSpan(start, tuple(rng.choices(range(3), k=rng.randint(1, 6))))
                tree = _random_tree(rng, rng.randrange(6))
                if start + 20 > 60 or not cache.reserve(span, tree):
                    cache.release()
                    tokens.clear()
                    continue
                memory.run(cache, span, tree)
                path = tree.path(rng.randrange(len(tree) + 1))
                cache.keep(path)
                tokens += [*span.token_ids, *(tree.node(number).token_id for number in path)]
            case "truncate":
                cache.truncate(rng.randrange(cache.cached_len + 1))
            case "release":
                cache.release()
            case "adopt":
                cache.adopt([*tokens, 1])
        for one, expected in zip(caches, known, strict=True):
            assert memory.tokens(one) == expected[: one.cached_len]
    for cache in caches:
        cache.release()
    assert memory.pool.usage.num_held == 0


def _random_tree(rng: random.Random, size: int) -> ProposalTree:
    tree = ProposalTree()
    while len(tree) < size:
        parent, token_id = rng.randrange(len(tree) + 1), rng.randrange(4)
        if tree.child(parent, token_id) is None:
            tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree
