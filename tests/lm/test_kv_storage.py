"""The memory of the pool: zeros that take no memory before they are written."""

import os
from pathlib import Path

import torch

from outrider.lm.kv_storage import KVStorage, LayerShape, lazy_zeros
from outrider.lm.step_layout import PageCopy

CPU = torch.device("cpu")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_zeros_take_memory_only_where_they_are_written_to() -> None:
    before = _resident_bytes()
    zeros = lazy_zeros((1 << 10, 1 << 20), torch.float32, CPU)
    assert zeros.shape == (1 << 10, 1 << 20)
    zeros[3, 5] = 1.0
    zeros[1000, -1] = 2.0
    assert [zeros[3, 5].item(), zeros[1000, -1].item(), zeros[3, 6].item(), zeros[999, -1].item()] == [1, 2, 0, 0]
    assert _resident_bytes() - before < 64 << 20


def test_layers_have_slots_of_their_own() -> None:
    storage = KVStorage([LayerShape(2, 4, 8), LayerShape(2, 8, 4)], 3, 16, torch.bfloat16, CPU)
    for number, tensor in enumerate(storage.tensors):
        tensor.fill_(number + 1)
    assert [tuple(tensor.shape) for tensor in storage.tensors] == [(48, 2, 4), (48, 2, 8), (48, 2, 8), (48, 2, 4)]
    assert [tensor.unique().item() for tensor in storage.tensors] == [1, 2, 3, 4]


def test_new_pages_are_cleared_before_pages_are_copied() -> None:
    storage = KVStorage([LayerShape(1, 2, 2)], 4, 4, torch.float32, CPU)
    keys, values = storage.layer(0)
    keys.fill_(float("nan"))
    values.fill_(1.0)
    storage.prepare(new_pages=[2], copies=[PageCopy(2, 3, 1)])
    assert keys.view(4, -1)[2:].eq(0).all() and values.view(4, -1)[2:].eq(0).all()
    assert keys.view(4, -1)[:2].isnan().all()


def test_new_pages_stay_as_they_are_where_only_what_is_seen_is_read() -> None:
    storage = KVStorage([LayerShape(1, 2, 2)], 4, 4, torch.float32, CPU, reads_masked=False)
    for tensor in storage.tensors:
        tensor.fill_(float("nan"))
    storage.prepare(new_pages=[2], copies=[])
    assert all(tensor.isnan().all() for tensor in storage.tensors)


def test_of_a_page_only_what_is_read_is_copied() -> None:
    for reads_masked, num_copied in ((False, 3), (True, 4)):
        storage = KVStorage([LayerShape(1, 2, 2)], 3, 4, torch.float32, CPU, reads_masked=reads_masked)
        for tensor in storage.tensors:
            tensor[4:8] = torch.arange(1.0, 5.0).view(4, 1, 1)
        storage.prepare(new_pages=[2], copies=[PageCopy(1, 2, 3)])
        for tensor in storage.tensors:
            assert tensor[8:, 0, 0].tolist() == [1.0, 2.0, 3.0, 4.0][:num_copied] + [0.0] * (4 - num_copied)


def test_pages_head_by_head_have_the_bytes_of_pages_by_slots() -> None:
    kept = []
    for by_heads in (False, True):
        storage = KVStorage([LayerShape(2, 4, 8)] * 2, 3, 4, torch.float32, CPU, reads_masked=False, by_heads=by_heads)
        size = storage.read_page(1).numel()
        storage.write_page(1, torch.arange(size).to(torch.uint8))
        storage.prepare(new_pages=[2], copies=[PageCopy(1, 2, 3)])
        kept.append([storage.layout, *(storage.read_page(page).tolist() for page in range(3))])
        if by_heads:
            assert [tuple(tensor.shape) for tensor in storage.layer(1)] == [(3, 2, 4, 4), (3, 2, 4, 8)]
            assert all(tensor.is_contiguous() for tensor in storage.tensors)
            # Position 2 of the second head.
            content = storage.layer(0)[0]
            assert torch.equal(content[2, 1, 2], content[1, 1, 2])
            assert not content[2, :, 3].any()
    assert kept[0] == kept[1]
