"""The native product: bits by definition, whatever the rows, threads and variant; errors; and how it is built."""

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider import native
from outrider.native import Variant, build, pack

BEST = native.best_variant()
SHAPES = [(576, 960), (1536, 576), (64, 33), (63, 20), (7, 16), (1, 1)]

pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")
Product = Callable[..., torch.Tensor]


@pytest.fixture(params=[item for item in Variant if BEST is not None and item <= BEST], ids=lambda item: item.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    """Each that this CPU can run."""
    return Variant(request.param)


@pytest.fixture
def product(variant: Variant) -> Product:
    """The product, with weights that are not packed yet."""

    def run(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        operator = torch.ops.outrider.packed_product.default
        output: torch.Tensor = operator(rows, pack(weight), bias, len(weight), int(variant))
        return output

    return run


def given(num_rows: int, num_in: int, num_out: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randn(num, num_in, generator=generator) for num in (num_rows, num_out))
    return rows.bfloat16(), weight.bfloat16()


def chained(rows: torch.Tensor, weight: torch.Tensor, variant: Variant) -> torch.Tensor:
    """Adds the products in the variant's order, one rounding each. Returns float32."""
    # Exact in float64: a product has 16 bits, and the sum's exponents are near each other.
    left, right = rows.double().numpy(), weight.double().numpy()

    def add(sums: np.ndarray, inputs: Iterable[int]) -> np.ndarray:
        for at in inputs:
            sums = (sums + np.outer(left[:, at], right[:, at])).astype(np.float32)
        return sums

    num = left.shape[1]
    zero = sums = np.zeros((len(left), len(right)), np.float32)
    if variant is Variant.AMX:
        # Even and odd inputs of a tile for themselves.
        for first in range(0, num, 32):
            tile = range(first, min(first + 32, num))
            sums = sums + (add(zero, tile[::2]) + add(zero, tile[1::2]))
    else:
        # Odd inputs of a pair before even ones.
        sums = add(zero, (at for pair in range(0, num, 2) for at in (pair + 1, pair) if at < num))
    return torch.from_numpy(sums)


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_an_output_is_one_chain_of_additions(product: Product, variant: Variant, num_in: int, num_out: int) -> None:
    rows, weight = given(9, num_in, num_out)
    assert torch.equal(product(rows, weight), chained(rows, weight, variant).bfloat16())


@pytest.mark.parametrize("num_rows", [3, 9, 70])
def test_without_inputs_it_is_the_bias(product: Product, num_rows: int) -> None:
    rows, weight = given(num_rows, 0, 5)
    bias = torch.arange(5).bfloat16()
    assert torch.equal(product(rows, weight, bias), bias.expand(num_rows, 5))
    assert not product(rows, weight).any()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_bits_depend_on_nothing_but_the_row(product: Product, num_in: int, num_out: int, num_threads: int) -> None:
    rows, weight = given(40, num_in, num_out)
    expected = product(rows, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num in (*range(1, 20), 24, 25, 31, 39):
            assert torch.equal(product(rows[:num], weight), expected[:num]), num
            assert torch.equal(product(rows[-num:], weight), expected[-num:]), num
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num", [33, 512, 513, 1100])
def test_bits_are_those_of_few_rows_where_many_pass_over_a_part_of_a_weight(product: Product, num: int) -> None:
    rows, weight = given(num, 1070, 37)
    expected = torch.cat([product(few, weight) for few in rows.split(9)])
    assert torch.equal(product(rows, weight), expected)


def segments(packed: torch.Tensor) -> list[bool]:
    """Returns of each segment, in order, whether it is compressed (see packed_weight.h)."""
    num_blocks, num_pairs = packed[24:40].view(torch.int64).tolist()
    places = packed[64 : 64 + 4 * num_blocks * -(-num_pairs // 16)].view(torch.int32)
    return [place & 1 == 1 for place in places.tolist()]


def test_nearly_all_weights_of_a_model_are_compressed() -> None:
    weight = given(1, 1536, 960)[1] * 0.04
    found = segments(pack(weight))
    assert len(found) == 60 * 48
    assert sum(found) > 0.9 * len(found)
    assert segments(pack(torch.zeros_like(weight))) == [True] * len(found)


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 96), (100, 33), (70, 20)])
def test_compressed_or_not_a_weight_is_the_same(product: Product, num_in: int, num_out: int) -> None:
    weight = torch.rand(num_out, num_in, generator=torch.Generator().manual_seed(5)).add(0.5).bfloat16()
    # Numbers of many sizes, in some segments of some blocks.
    for block, segment in ((0, 0), (1, 1), (3, 1), (3, 4), (5, 17)):
        part = weight[16 * block : 16 * block + 16, 32 * segment : 32 * segment + 32]
        part *= 2.0 ** torch.arange(-60, 60, 5).repeat(32)[: part.numel()].view_as(part)  # exact
    found = segments(pack(weight))
    assert not all(found)
    assert any(found)
    for rows in torch.eye(num_in).bfloat16(), torch.eye(num_in)[7:10].bfloat16():
        assert torch.equal(product(rows, weight), rows @ weight.T)


def test_the_memory_of_a_weight_follows_from_its_shape() -> None:
    # Layers of one shape run the same compiled code.
    ordinary = given(1, 70, 33)[1]
    many_sizes = ordinary * (2.0 ** torch.arange(-105, 105, 3)).bfloat16()
    assert len(pack(many_sizes)) == len(pack(ordinary))
    assert sum(segments(pack(many_sizes))) < sum(segments(pack(ordinary)))


def test_a_bias_is_added_before_the_sum_is_rounded(product: Product) -> None:
    rows, weight = given(3, 64, 33)
    bias = torch.randn(33).bfloat16()
    expected = (rows.double() @ weight.double().T + bias.double()).bfloat16()
    assert torch.allclose(product(rows, weight, bias).float(), expected.float(), rtol=1 / 128)


def test_rows_of_any_layout(product: Product) -> None:
    rows, weight = given(6, 64, 33)
    expected = product(rows, weight)
    wide = torch.randn(6, 101).bfloat16()
    wide[:, 3:67] = rows
    assert torch.equal(product(wide[:, 3:67], weight), expected)
    shifted = torch.empty(6 * 64 + 1, dtype=torch.bfloat16)[1:].view(6, 64)
    assert torch.equal(product(shifted.copy_(rows), weight), expected)
    assert torch.equal(product(rows.view(2, 3, 64), weight), expected.view(2, 3, 33))
    assert product(rows[:0], weight).shape == (0, 33)


def test_numbers_that_are_no_ordinary_ones(product: Product) -> None:
    rows, weight = given(4, 32, 16)
    rows[0, 0], rows[1, 0], rows[2, 0] = float("inf"), float("nan"), 1e-39
    output = product(rows, weight)
    assert torch.equal(output[0], (weight[:, 0] * float("inf")))
    assert output[1].isnan().all()
    rows[2, 0] = 0
    assert torch.equal(product(rows, weight)[2:], output[2:])  # subnormal numbers count as zero
    tiny = product((rows[3:].float() * 1e-30).bfloat16(), (weight.float() * 1e-9).bfloat16())
    assert not tiny.any()
    assert not product(torch.zeros_like(rows), weight, torch.full((16,), 1e-39).bfloat16()).any()


def test_the_largest_sums_round_to_infinity(product: Product) -> None:
    rows = torch.full((1, 2), 3e38).bfloat16()
    assert product(rows, torch.ones(1, 2).bfloat16()).isinf().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(2, 8)}, "must be bfloat16"),
        ({"rows": torch.zeros(2, 10).bfloat16()}, "number of inputs"),
        ({"weight": torch.zeros(9, 8).bfloat16()}, "not packed"),
        ({"weight": torch.zeros(1000, dtype=torch.uint8)}, "not packed"),
        ({"out_features": 17}, "not packed for so many"),
        ({"bias": torch.zeros(3).bfloat16()}, "bias"),
        ({"variant": 4}, "variant 4"),
        ({"variant": -1}, "variant -1"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, object], message: str) -> None:
    arguments = {
        "rows": torch.zeros(2, 8).bfloat16(),
        "weight": pack(torch.zeros(9, 8).bfloat16()),
        "bias": None,
        "out_features": 9,
        "variant": 0,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.outrider.packed_product.default(**arguments | change)


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no library yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "in_package", lambda: tmp_path / "none")


@pytest.mark.usefixtures("unbuilt")
def test_it_is_built_once_for_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: compiler(tmp_path, 'echo x > "$last"'))
    first = build.ensure_library()
    assert first is not None
    assert first.read_text() == "x\n"
    assert build.ensure_library() == first
    assert capfd.readouterr().err.count("compiling the native operators (once)") == 1
    assert {path.suffix for path in first.parent.iterdir()} == {".so", ".lock"}


@pytest.mark.usefixtures("unbuilt")
def test_a_compiler_that_fails_costs_speed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        build, "find_compiler", lambda: compiler(tmp_path, "echo 'x.cpp:1: error: no such thing' >&2; exit 1")
    )
    assert native.best_variant.__wrapped__() is None
    assert "no native operators" in caplog.text
    assert "x.cpp:1: error: no such thing" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


def test_a_library_that_cannot_be_loaded_costs_speed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "operators.so"
    damaged.write_text("no library")
    monkeypatch.setattr(build, "in_package", lambda: damaged)
    assert native.best_variant.__wrapped__() is None
    assert "no native operators" in caplog.text


def test_a_library_of_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = build.in_package()
    monkeypatch.setattr(build, "_COMMON", ("-O0",))
    assert build.in_package() != now
    assert build.in_package().parent == now.parent


@pytest.mark.usefixtures("unbuilt")
def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert native.best_variant.__wrapped__() is None


def test_the_compiler_is_that_of_torch_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    assert build.find_compiler() == get_cpp_compiler()
    monkeypatch.setenv("CXX", compiler(tmp_path, "true"))
    assert build.find_compiler() == str(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert build.find_compiler() is None


def compiler(folder: Path, command: str) -> str:
    """Writes a program that answers `--version`, and else runs the command with its last argument in `last`."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\n{command}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return os.fspath(path)
