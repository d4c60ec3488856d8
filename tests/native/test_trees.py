"""The operator that grows trees: several sessions at once, and errors; see also `tests.drafters.test_grown_tree`."""

import pytest
import torch

from outrider.native import pack_bytes
from tests.native.test_product import BEST

pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")
H, LOGITS, RANK, VOCABULARY, NUM_RANKS = 48, 70, 20, 90, 3
GROW = torch.ops.outrider.head_trees


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def arguments() -> dict[str, object]:
    """Returns those of two sessions, of which the second samples."""
    torch.manual_seed(2)
    rates = [0.6, 0.2, 0.1] * 4
    return {
        "outputs": numbers(7, H),
        "num_rows": [3, 4],
        "last_ids": [5, 6],
        "norm": numbers(H),
        "epsilon": 1e-5,
        "output": pack_bytes(numbers(LOGITS, H)),
        "state": pack_bytes(numbers(RANK, H)),
        "token": pack_bytes(numbers(RANK, H)),
        "added": pack_bytes(numbers(LOGITS, RANK)),
        "rank": RANK,
        "embedding": numbers(VOCABULARY, H),
        "vocabulary": torch.arange(10, 10 + LOGITS),
        "num_nodes": [6, 5],
        "end_depths": [3, 2],
        "num_choices": [3, 2],
        "least_likelihoods": [0.0, 0.0],
        "inverse_temperatures": [1.0, 2.0],
        "first_counters": [-1, 0],
        "counters": torch.tensor([(at, 0, 1, 2, 3) for at in range(2)]),
        "stop_ids": [11, 12],
        "num_stop_ids": [0, 2],
        "values": [*rates, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e-4, 1.0],
        "num_ranks": NUM_RANKS,
        "width": 12,
        "variant": 0,
    }


def test_each_session_has_its_own_tree() -> None:
    choices, likelihoods, counts = GROW.default(**arguments())
    assert choices.shape == (3, len(likelihoods)) and int(counts.sum()) == len(likelihoods)
    first = 0
    for num, num_nodes, num_choices in zip(counts.tolist(), (6, 5), (3, 2), strict=True):
        parents, token_ids, sent = choices[:, first : first + num].tolist()
        assert sorted(filter(None, sent)) == list(range(1, num_nodes + 1))
        assert all(parents.count(parent) == num_choices for parent in set(parents))
        assert all(parent < place for place, parent in enumerate(parents, 1))
        assert all(10 <= token_id < 10 + LOGITS for token_id in token_ids)
        # A node is sent after its parent.
        assert all(not parent or 0 < sent[parent - 1] < own for parent, own in zip(parents, sent, strict=True) if own)
        first += num
    assert bool((likelihoods > 0).all()) and bool((likelihoods <= 1).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": torch.zeros(7, H)}, "outputs must be bfloat16"),
        ({"outputs": numbers(8, H)}, "the sessions have 7 rows, not 8"),
        ({"outputs": numbers(7)}, "two dimensions"),
        ({"last_ids": [5]}, "each of 2 sessions has one of all numbers, not 1"),
        ({"last_ids": [5, VOCABULARY]}, "there is no token 90"),
        ({"last_ids": [-1, 0]}, "there is no token -1"),
        ({"norm": numbers(H + 1)}, "norm must be bfloat16"),
        ({"rank": RANK + 16}, "number of inputs|so many outputs"),
        ({"embedding": numbers(H, VOCABULARY).T}, "embedding must be bfloat16, contiguous"),
        ({"vocabulary": torch.arange(VOCABULARY - LOGITS + 1, VOCABULARY + 1)}, "tokens without an embedding"),
        ({"vocabulary": torch.arange(LOGITS, dtype=torch.int32)}, "vocabulary must be int64"),
        ({"num_nodes": [0, 5]}, "a tree of 0 nodes, 3 deep, cannot grow over 3 rows"),
        ({"end_depths": [4, 2]}, "a tree of 6 nodes, 4 deep, cannot grow over 3 rows"),
        ({"end_depths": [0, 2]}, "a tree of 6 nodes, 0 deep"),
        ({"num_choices": [4, 2]}, "there are no 4 choices"),
        ({"first_counters": [-1, 1]}, "there is no counter 2"),
        ({"counters": torch.zeros(2, 4, dtype=torch.int64)}, r"counters must be int64 \[C, 5\]"),
        ({"num_stop_ids": [0, 1]}, "each stop token is of a session"),
        ({"num_stop_ids": [-1, 3]}, "cannot have -1 stop tokens"),
        ({"values": [0.5] * 10}, "not those of whole ranks"),
        ({"width": 0}, "not those of whole ranks"),
        ({"variant": 4}, "variant 4"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        GROW.default(**arguments() | change)
