"""The memory that packed weights share."""

import pytest
import torch

from outrider import native
from outrider.native import pack
from outrider.native.memory import WeightMemory, huge_pages

pytestmark = pytest.mark.skipif(native.best_variant() is None, reason="no native operators here")


def test_memory_is_zero_and_of_any_size() -> None:
    for num_bytes in (0, 1, 5000, 3 << 20):
        memory = huge_pages(num_bytes)
        assert memory.shape == (num_bytes,) and memory.dtype == torch.uint8 and not memory.any()
        memory.fill_(1)


def test_weights_keep_what_was_written_to_them() -> None:
    torch.manual_seed(0)
    memory = WeightMemory()
    # Some fill a chunk, one needs more than a chunk.
    sizes = [(1,), (63, 3), (1 << 20,), (30 << 20,), (31 << 20,), (5,), (65 << 20,), (7, 8)]
    given = [torch.randint(256, size, dtype=torch.uint8) for size in sizes]
    written = [len(weight.view(-1)) * part // 4 for weight, part in zip(given, (4, 4, 1, 4, 3, 4, 4, 0), strict=True)]
    placed = [memory.place(weight, num) for weight, num in zip(given, written, strict=True)]
    for weight, num, place in zip(given, written, placed, strict=True):
        assert place.shape == weight.shape and place.is_contiguous()
        assert place.storage_offset() == 0 and place.data_ptr() % 64 == 0
        assert torch.equal(place.view(-1)[:num], weight.view(-1)[:num])


def test_weights_of_other_types_are_placed_too() -> None:
    weight = torch.randn(3, 5)
    assert torch.equal(WeightMemory().place(weight, weight.nbytes), weight)


@pytest.mark.parametrize("shape", [(48, 64), (16, 96), (17, 33), (5, 31), (160, 130), (3, 0), (0, 8)])
@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["compressed", "ordinary"])
def test_nothing_behind_the_written_bytes_is_read(shape: tuple[int, int], scale: float) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * scale).bfloat16()
    packed = torch.ops.outrider.pack_weight(weight)
    num = torch.ops.outrider.written_bytes(packed)
    assert 0 < num <= len(packed)
    rows = torch.randn(3, shape[1]).bfloat16()
    variant = int(native.best_variant() or 0)
    wanted = torch.ops.outrider.packed_product(rows, pack(weight), None, shape[0], variant)
    packed[num:] = 0xFF
    assert torch.equal(torch.ops.outrider.packed_product(rows, packed, None, shape[0], variant), wanted)


def test_most_weights_are_written_in_three_quarters_of_their_bytes() -> None:
    packed = torch.ops.outrider.pack_weight(torch.zeros(320, 640, dtype=torch.bfloat16))
    assert torch.ops.outrider.written_bytes(packed) < 0.78 * len(packed)


def test_written_bytes_are_those_of_packed_weights_only() -> None:
    for wrong in (torch.zeros(8, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)):
        with pytest.raises(RuntimeError, match="not packed"):
            torch.ops.outrider.written_bytes(wrong)
