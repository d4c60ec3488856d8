"""The page pool: sharing by digest, reuse, eviction."""

import pytest

from outrider.lm.pages import SCRATCH_PAGE, PagePool, page_digest


def _pool(num_pages: int = 4) -> PagePool:
    return PagePool(num_pages, page_len=2, page_bytes=10, root=b"model")


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = _pool()
    pages = pool.allocate(4)
    assert pages is not None
    assert len(set(pages)) == 4
    assert SCRATCH_PAGE not in pages
    assert pool.allocate(1) is None
    assert (pool.usage.num_held, pool.usage.used_bytes, pool.usage.max_len) == (4, 40, 8)
    pool.free(pages[:1])
    assert pool.allocate(1) == pages[:1]


def test_a_refused_taking_changes_nothing() -> None:
    pool = _pool()
    assert pool.allocate(5) is None
    assert pool.usage.num_held == 0
    assert pool.allocate(4) is not None


def test_published_pages_are_shared_and_outlive_their_holders() -> None:
    pool = _pool()
    (page,) = pool.allocate(1) or []
    digest = page_digest(pool.root(b""), [1, 2])
    pool.publish(page, digest)
    assert pool.acquire(digest) == page
    assert pool.usage.num_held == 1
    assert not pool.make_private(page)
    pool.free([page])
    pool.free([page])
    assert (pool.usage.num_held, pool.usage.num_reusable) == (0, 1)
    assert pool.acquire(digest) == page
    assert (pool.usage.num_held, pool.usage.num_reusable, pool.usage.num_hit_tokens) == (1, 0, 4)


def test_a_private_page_cannot_be_found() -> None:
    pool = _pool()
    (page,) = pool.allocate(1) or []
    pool.publish(page, b"digest")
    assert pool.make_private(page)
    assert pool.acquire(b"digest") is None
    pool.free([page])
    assert pool.usage.num_reusable == 0


def test_memory_is_taken_from_the_least_recently_held_and_from_tails_first() -> None:
    pool = _pool()
    old, new = pool.allocate(2) or [], pool.allocate(2) or []
    for name, pages in (("old", old), ("new", new)):
        for index, page in enumerate(pages):
            pool.publish(page, f"{name}{index}".encode())
    pool.free(old)
    pool.free(new)
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.usage.num_evicted_pages == 3
    assert pool.acquire(b"old0") is None
    assert pool.acquire(b"new0") == new[0]


def test_equal_pages_are_published_once() -> None:
    pool = _pool()
    first, second = pool.allocate(2) or []
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.free([second])
    assert pool.acquire(b"same") == first
    assert pool.usage.num_reusable == 0


def test_digests_tell_models_salts_and_prefixes_apart() -> None:
    pool, other = _pool(), PagePool(4, 2, 10, root=b"other model")
    roots = {pool.root(b""), pool.root(b"a"), pool.root(b"b"), other.root(b""), other.root(b"a")}
    assert len(roots) == 5
    digests = {page_digest(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1])}
    assert len(digests) == 15


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="num_pages is 0"):
        PagePool(0, 2, 10)


def test_what_is_kept_beside_pages_leaves_fewer_of_them() -> None:
    pool = PagePool(8, page_len=2, page_bytes=10, root=b"model")
    pages = pool.allocate(8) or []
    for page in pages:
        pool.publish(page, bytes([page]))
    pool.free(pages[:5])
    held = pages[5:]
    pool.set_extra_bytes(6)  # 80 bytes are five pages of 16
    assert (pool.usage.num_pages, pool.usage.page_bytes, pool.usage.max_len) == (5, 16, 10)
    assert pool.usage.num_reusable == len([page for page in pages[:5] if page <= 5])
    assert pool.allocate(3) is None, "three are held yet, of five"
    more = pool.allocate(2)
    assert more is not None and max(more) <= 5
    pool.free(held)
    pool.free(more)
    # Pages beyond the fifth are removed, and not found any more.
    assert all(pool.acquire(bytes([page])) is None for page in range(6, 9))
    whole = pool.allocate(5)
    assert whole is not None and set(whole) == {1, 2, 3, 4, 5}
    assert pool.allocate(1) is None
