"""A draft head's native operators: what its layers are by definition, for every variant; errors."""

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from outrider.native import Variant, pack_bytes
from tests.native.byte_reference import byte_product
from tests.native.test_product import BEST

pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")
OPERATORS = torch.ops.outrider
H, INNER, HEADS, KV_HEADS, DIM, LOGITS, RANK, VOCABULARY = 48, 36, 6, 2, 10, 70, 20, 30
EPSILON = 1e-5


@pytest.fixture(params=[item for item in Variant if BEST is not None and item <= BEST], ids=lambda item: item.name)
def variant(request: pytest.FixtureRequest) -> int:
    """Each that this CPU can run."""
    return int(request.param)


@pytest.fixture(params=[1, 5, 40])
def num_rows(request: pytest.FixtureRequest) -> int:
    """Numbers of rows: one, some, and several threads' worth."""
    return int(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return byte_product(rows.bfloat16(), weight, bias)


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(rows.float(), weight.shape, weight.float(), EPSILON)


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> list[torch.Tensor]:
    return [*pack_bytes(weight), *(() if bias is None else (bias,))]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that numbers differ by a few roundings: of bfloat16, and of rows to 8 bits."""
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()


@pytest.mark.parametrize("has_bias", [False, True])
def test_queries_and_keys_are_rotated(variant: int, num_rows: int, *, has_bias: bool) -> None:
    embeddings, hidden, norms = numbers(num_rows, H), numbers(num_rows, H), numbers(2, H)
    weight = numbers((HEADS + 2 * KV_HEADS) * DIM, 2 * H)
    bias = numbers(len(weight)) if has_bias else None
    angles = torch.randn(100, DIM // 2).repeat(1, 2)
    cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()
    positions = torch.randint(100, (num_rows,))
    heads, normed = OPERATORS.head_project.default(
        embeddings,
        hidden,
        norms,
        EPSILON,
        packed(weight, bias),
        cosines,
        sines,
        positions,
        HEADS + 2 * KV_HEADS,
        HEADS + KV_HEADS,
        variant,
    )
    expected_norm = norm(hidden, norms[1])
    inputs = torch.cat([norm(embeddings, norms[0]), expected_norm], dim=1)
    expected = product(inputs, weight, bias).view(num_rows, -1, DIM).transpose(0, 1)[None]
    query, key, value = expected.split([HEADS, KV_HEADS, KV_HEADS], 1)
    query, key = apply_rotary_pos_emb(query, key, cosines[positions].float()[None], sines[positions].float()[None])
    assert_near(normed, expected_norm)
    assert_near(heads, torch.cat([query, key, value], 1)[0].transpose(0, 1))


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_is_finished(variant: int, num_rows: int, *, has_bias: bool) -> None:
    attended, residual, weight = numbers(num_rows, HEADS * DIM), numbers(num_rows, H), numbers(H)
    o, gate_up, down = numbers(H, HEADS * DIM), numbers(2 * INNER, H), numbers(H, INNER)
    biases = [numbers(len(item)) if has_bias else None for item in (o, gate_up, down)]
    layers = [packed(*item) for item in zip((o, gate_up, down), biases, strict=True)]
    found = OPERATORS.head_finish.default(
        attended, residual, layers[0], weight, EPSILON, layers[1], layers[2], INNER, variant
    )
    hidden = residual.float() + product(attended, o, biases[0])
    gate, up = product(norm(hidden.bfloat16(), weight), gate_up, biases[1]).chunk(2, dim=1)
    assert_near(found, hidden + product(functional.silu(gate) * up, down, biases[2]))


def test_logits_are_of_the_norm(variant: int, num_rows: int) -> None:
    outputs, weight, output = numbers(num_rows, H), numbers(H), numbers(LOGITS, H)
    states, logits = OPERATORS.head_logits.default(outputs, weight, EPSILON, packed(output), LOGITS, variant)
    assert_near(states, norm(outputs, weight))
    assert_near(logits, product(norm(outputs, weight), output))


def test_a_transition_is_added_to_its_rows_logits(variant: int, num_rows: int) -> None:
    logits, states = numbers(3, LOGITS), numbers(3, RANK)
    embedding, token, output = numbers(VOCABULARY, H), numbers(RANK, H), numbers(LOGITS, RANK)
    rows, token_ids = torch.randint(3, (num_rows,)), torch.randint(VOCABULARY, (num_rows,))
    found = OPERATORS.transition_logits.default(
        logits, states, rows.tolist(), token_ids.tolist(), embedding, packed(token), packed(output), variant
    )
    inner = functional.silu(product(embedding[token_ids], token) + states[rows].float())
    assert_near(found, logits[rows].float() + product(inner, output))


def test_all_variants_give_the_same_bits() -> None:
    found = []
    for variant in range(int(BEST or 0) + 1):
        torch.manual_seed(4)
        attended, residual, weight = numbers(7, HEADS * DIM), numbers(7, H), numbers(H)
        layers = [packed(numbers(*shape)) for shape in ((H, HEADS * DIM), (2 * INNER, H), (H, INNER), (LOGITS, H))]
        outputs = OPERATORS.head_finish.default(
            attended, residual, layers[0], weight, EPSILON, layers[1], layers[2], INNER, variant
        )
        found.append(OPERATORS.head_logits.default(outputs, weight, EPSILON, layers[3], LOGITS, variant)[1])
    assert all(torch.equal(item, found[0]) for item in found)


def test_the_silu_of_large_numbers_is_one_of_them_or_nothing(variant: int) -> None:
    """The gate of a layer whose other parts add nothing and change nothing."""
    size = 16
    one, zero = torch.eye(size).bfloat16(), torch.zeros(size, size).bfloat16()
    values = torch.tensor([1e4, 300.0, 90.0, 5.0, 0.5, 1e-3, 0.0, -1e-3, -0.5, -5.0, -20.0, -80.0, -90.0, -300.0, -1e4])
    gate_bias = torch.cat([values, torch.ones(size + 1)]).bfloat16()
    found = OPERATORS.head_finish.default(
        torch.zeros(1, size).bfloat16(),
        torch.zeros(1, size).bfloat16(),
        packed(zero),
        torch.ones(size).bfloat16(),
        EPSILON,
        packed(torch.cat([zero, zero]), gate_bias),
        packed(one * 4),
        size,
        variant,
    )
    # Rounded to 8 bits as a row: of the numbers beside the largest little is left.
    expected = 4 * byte_product(functional.silu(gate_bias[:size].float()).bfloat16()[None], one)
    torch.testing.assert_close(found.float(), expected, rtol=1 / 64, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": numbers(3, H)}, "embeddings must be bfloat16"),
        ({"hidden": torch.zeros(2, H)}, "hidden must be bfloat16"),
        ({"norms": numbers(H)}, "norms must be bfloat16"),
        ({"sines": numbers(5, DIM)}, "sines must be bfloat16"),
        ({"positions": torch.tensor([0, 4])}, "position 4 has no rotation"),
        ({"positions": torch.tensor([-1, 0])}, "position -1 has no rotation"),
        ({"positions": torch.tensor([0])}, "positions must be int64"),
        ({"num_rotated": 11}, "cannot be rotated"),
        ({"num_heads": 12}, "not packed for so many outputs"),
        ({"variant": 4}, "variant 4"),
    ],
)
def test_what_cannot_be_projected_is_an_error(change: dict[str, object], message: str) -> None:
    arguments = {
        "embeddings": numbers(2, H),
        "hidden": numbers(2, H),
        "norms": numbers(2, H),
        "epsilon": EPSILON,
        "qkv": packed(numbers(10 * DIM, 2 * H)),
        "cosines": numbers(4, DIM),
        "sines": numbers(4, DIM),
        "positions": torch.tensor([0, 3]),
        "num_heads": 10,
        "num_rotated": 8,
        "variant": 0,
    }
    with pytest.raises(RuntimeError, match=message):
        OPERATORS.head_project.default(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [3]}, "no row 3"),
        ({"rows": [-1]}, "no row -1"),
        ({"token_ids": [VOCABULARY]}, "no token 30"),
        ({"token_ids": []}, "a row and a token"),
        ({"states": numbers(2, RANK)}, "states must be bfloat16"),
        ({"embedding": numbers(H, VOCABULARY).T}, "embedding must be bfloat16, contiguous"),
        ({"token": packed(numbers(RANK, H + 4))}, "number of inputs"),
    ],
)
def test_nodes_that_do_not_exist_are_an_error(change: dict[str, object], message: str) -> None:
    arguments = {
        "logits": numbers(3, LOGITS),
        "states": numbers(3, RANK),
        "rows": [2],
        "token_ids": [0],
        "embedding": numbers(VOCABULARY, H),
        "token": packed(numbers(RANK, H)),
        "output": packed(numbers(LOGITS, RANK)),
        "variant": 0,
    }
    with pytest.raises(RuntimeError, match=message):
        OPERATORS.transition_logits.default(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": numbers(2, 6)}, "features must be bfloat16"),
        ({"token_ids": [1, 2]}, "each column has a token"),
        ({"token_ids": [1, 2, VOCABULARY]}, "no token 30"),
        ({"token_ids": [1, 2, -1]}, "no token -1"),
        ({"num_columns": [3]}, "differ in number"),
        ({"num_columns": [3, 0]}, "a session has a column"),
        ({"num_masks": [0, 4]}, "more mask rows than there are"),
        ({"num_masks": [-1, 0]}, "no less than 0 mask rows"),
        ({"firsts": [-1, 0]}, "slots from 0 on"),
        ({"firsts": [0, 30]}, "there is no slot 32"),
        ({"keys": [torch.zeros(32, KV_HEADS, DIM).bfloat16()]}, "each session has keys and values"),
        ({"values": [torch.zeros(32, KV_HEADS, DIM)] * 2}, "keys and values must be bfloat16"),
        ({"values": [torch.zeros(33, KV_HEADS, DIM).bfloat16()] * 2}, "whole pages"),
        ({"keys": [torch.zeros(32, KV_HEADS, DIM).bfloat16(), torch.zeros(32, 1, DIM).bfloat16()]}, "whole pages"),
        ({"masks": numbers(2, 3, H + 2)}, "masks must be bfloat16"),
        ({"norms": numbers(2, H)}, "norms must be bfloat16"),
        ({"cosines": numbers(2, DIM), "sines": numbers(2, DIM)}, "position 4 has no rotation"),
        ({"num_heads": 5}, "the heads do not fit"),
        ({"num_heads": 4}, "not packed for so many outputs"),
        ({"variant": 4}, "variant 4"),
    ],
)
def test_columns_that_do_not_fit_are_an_error(change: dict[str, object], message: str) -> None:
    arguments = {
        "features": numbers(3, 6),
        "token_ids": [1, 2, 0],
        "num_columns": [2, 1],
        "num_masks": [0, 2],
        "firsts": [3, 0],
        "keys": [torch.zeros(32, KV_HEADS, DIM).bfloat16() for _ in range(2)],
        "values": [torch.zeros(32, KV_HEADS, DIM).bfloat16() for _ in range(2)],
        "embedding": numbers(VOCABULARY, H),
        "masks": numbers(2, 3, H),
        "fc": packed(numbers(H, 6)),
        "norms": numbers(3, H),
        "epsilon": EPSILON,
        "starts_normed": False,
        "qkv": packed(numbers((HEADS + 2 * KV_HEADS) * DIM, 2 * H)),
        "cosines": numbers(64, DIM),
        "sines": numbers(64, DIM),
        "num_heads": HEADS,
        "o": packed(numbers(H, HEADS * DIM)),
        "gate_up": packed(numbers(2 * INNER, H)),
        "down": packed(numbers(H, INNER)),
        "num_inner": INNER,
        "variant": 0,
    }
    assert OPERATORS.head_columns.default(**arguments).shape == (4, H)
    with pytest.raises(RuntimeError, match=message):
        OPERATORS.head_columns.default(**arguments | change)
