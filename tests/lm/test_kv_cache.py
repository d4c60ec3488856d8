"""The KV cache: positions, growth, truncation and branches."""

import pytest
import torch

from outrider.lm.kv_cache import BLOCK_LEN, BlockKVCache


def _rows(positions: list[int]) -> torch.Tensor:
    """Rows [2 heads, rows, 1] whose value is their mark."""
    return torch.tensor(positions, dtype=torch.float32).repeat(2, 1).unsqueeze(-1)


def _stored(cache: BlockKVCache, length: int) -> list[float]:
    keys, values = cache.blocks(0, -(-length // BLOCK_LEN))
    assert torch.equal(keys, values)
    return keys.permute(1, 0, 2, 3).reshape(2, -1)[0, :length].tolist()


def _write(cache: BlockKVCache, start: int, marks: list[int]) -> None:
    cache.begin(start + len(marks), (), [])
    cache.write(0, start, _rows(marks), _rows(marks))


def test_spans_cross_blocks_and_memory_grows() -> None:
    cache = BlockKVCache()
    marks = list(range(2 * BLOCK_LEN + 10))
    _write(cache, 0, marks[:250])
    before = cache.num_bytes
    _write(cache, 250, marks[250:])
    assert _stored(cache, len(marks)) == marks
    assert cache.cached_len == len(marks)
    assert cache.num_bytes > before


def test_truncation_keeps_memory_and_overwrites() -> None:
    cache = BlockKVCache()
    _write(cache, 0, list(range(300)))
    held = cache.num_bytes
    cache.truncate(200)
    cache.truncate(250)
    assert (cache.cached_len, cache.num_bytes) == (200, held)
    _write(cache, 200, [-1, -2])
    assert _stored(cache, 202) == [*range(200), -1, -2]


@pytest.mark.parametrize(
    ("path", "expected"), [((), []), ((1,), [101]), ((1, 2), [101, 102]), ((3, 4), [103, 104]), ((1, 5), [101, 105])]
)
def test_keep_moves_the_accepted_branch_to_its_positions(path: tuple[int, ...], expected: list[int]) -> None:
    # Nodes: 1 - 2 is the main line; 3 - 4 another branch from the root; 5 another child of 1.
    cache = BlockKVCache()
    cache.begin(BLOCK_LEN - 1, (1, 2), [3, 4, 5])
    marks = [*range(BLOCK_LEN - 1), 101, 102]
    cache.write(0, 0, _rows(marks), _rows(marks))
    cache.put_aside(0, _rows([103, 104, 105]), _rows([103, 104, 105]))
    cache.keep(path)
    length = BLOCK_LEN - 1 + len(path)
    assert cache.cached_len == length
    assert _stored(cache, length) == [*range(BLOCK_LEN - 1), *expected]


def test_keep_refuses_nodes_that_were_not_run() -> None:
    cache = BlockKVCache()
    cache.begin(1, (1,), [])
    with pytest.raises(ValueError, match="did not run"):
        cache.keep((2,))
