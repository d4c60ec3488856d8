"""The native product in 8 bits: exact sums, whatever the rows, threads and variant; errors."""

from collections.abc import Callable

import pytest
import torch

from outrider import native
from outrider.native import Variant, pack_bytes
from tests.native.byte_reference import byte_product, unpacked
from tests.native.test_product import BEST, SHAPES, given

pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")
Product = Callable[..., torch.Tensor]


@pytest.fixture(params=[item for item in Variant if BEST is not None and item <= BEST], ids=lambda item: item.name)
def product(request: pytest.FixtureRequest) -> Product:
    """The product by each variant, with weights that are not packed yet."""

    def run(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        layer = [*pack_bytes(weight), *(() if bias is None else (bias,))]
        output: torch.Tensor = torch.ops.outrider.byte_product.default(rows, layer, len(weight), int(request.param))
        return output

    return run


@pytest.mark.parametrize(("num_in", "num_out"), [*SHAPES, (65536, 3)])
def test_a_weight_is_the_nearest_multiple_of_its_outputs_scale(num_in: int, num_out: int) -> None:
    _, weight = given(1, num_in, num_out)
    packed, scales = pack_bytes(weight)
    integers, factors = unpacked(packed, num_out, num_in), scales.flatten()[:num_out]
    assert torch.equal(integers.abs().amax(1), torch.full((num_out,), 127.0))
    assert ((integers * factors[:, None] - weight.float()).abs() <= factors[:, None] * 0.5001).all()


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_it_is_the_exact_sum_times_the_scales(product: Product, num_in: int, num_out: int) -> None:
    rows, weight = given(9, num_in, num_out)
    bias = torch.randn(num_out).bfloat16()
    assert torch.equal(product(rows, weight), byte_product(rows, weight).bfloat16())
    assert torch.equal(product(rows, weight, bias), byte_product(rows, weight, bias).bfloat16())


def test_the_largest_sums_are_exact(product: Product) -> None:
    rows, weight = torch.full((2, 65536), 3.0).bfloat16(), torch.full((17, 65536), -2.0).bfloat16()
    assert torch.equal(product(rows, weight), torch.full((2, 17), -6.0 * 65536).bfloat16())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_depend_on_nothing_but_the_row(product: Product, num_threads: int) -> None:
    rows, weight = given(70, 1536, 200)
    expected = byte_product(rows, weight).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num in (*range(1, 20), 24, 31, 64, 65, 70):
            assert torch.equal(product(rows[-num:], weight), expected[-num:]), num
    finally:
        torch.set_num_threads(before)


def test_rows_of_any_layout(product: Product) -> None:
    rows, weight = given(6, 64, 33)
    expected = product(rows, weight)
    wide = torch.randn(6, 101).bfloat16()
    wide[:, 3:67] = rows
    assert torch.equal(product(wide[:, 3:67], weight), expected)
    assert torch.equal(product(rows.view(2, 3, 64), weight), expected.view(2, 3, 33))
    assert product(rows[:0], weight).shape == (0, 33)


def test_zeros_and_what_is_no_number_stay_in_their_row(product: Product) -> None:
    rows, weight = given(4, 21, 17)
    weight[5] = 0
    rows[0] = 0
    rows[1, 3], rows[2, 3] = float("inf"), float("nan")
    output = product(rows, weight)
    assert not output[0].any()
    assert not output[1:3].isfinite()[:, [0, 16]].any()
    assert torch.equal(output[3:], product(rows[3:], weight))
    assert not product(rows[3:], weight)[:, 5].any()
    assert torch.equal(product(rows[:, :0], weight[:, :0]), torch.zeros(4, 17).bfloat16())


PACKED, SCALES = torch.zeros(1, 2, 16, 4, dtype=torch.uint8), torch.zeros(1, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(2, 8)}, "must be bfloat16"),
        ({"rows": torch.zeros(2, 10).bfloat16()}, "number of inputs"),
        ({"layer": [PACKED]}, "a weight, scales and perhaps a bias"),
        ({"layer": [PACKED.char(), SCALES]}, "not packed in bytes"),
        ({"layer": [PACKED.view(1, 2, 4, 16), SCALES]}, "not packed in bytes"),
        ({"layer": [PACKED.repeat(2, 1, 1, 1), SCALES]}, "not packed for so many outputs"),
        ({"layer": [PACKED, SCALES[:, :8]]}, "scales"),
        ({"layer": [PACKED, torch.zeros(17)[1:].view(1, 16)]}, "scales"),
        ({"layer": [PACKED, SCALES, torch.zeros(3).bfloat16()]}, "bias"),
        ({"variant": 4}, "variant 4"),
        ({"variant": -1}, "variant -1"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, object], message: str) -> None:
    arguments = {"rows": torch.zeros(2, 8).bfloat16(), "layer": [PACKED, SCALES], "out_features": 9, "variant": 0}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.outrider.byte_product.default(**arguments | change)


def test_more_inputs_than_a_sum_holds_are_an_error() -> None:
    layer = list(pack_bytes(torch.zeros(1, 65540)))
    with pytest.raises(RuntimeError, match="exceeds 65536"):
        torch.ops.outrider.byte_product.default(torch.zeros(1, 65540).bfloat16(), layer, 1, int(native.Variant.AVX2))
