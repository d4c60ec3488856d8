"""Memory that is ready before a pass writes to it: as much as asked for, and no more."""

import ctypes
import mmap
import sys

import pytest
import torch

from outrider.lm.kv_storage import KVStorage, LayerShape, lazy_zeros
from outrider.lm.prefault import Prefault

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems clear memory at the first write")

CHUNK = 2 << 20
PAGE_BYTES = 64 << 10
NUM_PAGES = 160
"""Of a plane: five chunks."""


def planes() -> list[torch.Tensor]:
    return list(lazy_zeros((3, NUM_PAGES, PAGE_BYTES), torch.uint8, torch.device("cpu")))


def ready_pages(plane: torch.Tensor) -> list[int]:
    """Returns the pages whose memory is all there."""
    size = plane.nbytes // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * (size + 1))()
    start = plane.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(start), ctypes.c_size_t(plane.nbytes), resident) == 0, ctypes.get_errno()
    each = PAGE_BYTES // mmap.PAGESIZE
    return [page for page in range(NUM_PAGES) if all(resident[page * each : (page + 1) * each])]


def test_the_memory_behind_the_last_page_in_use_is_ready() -> None:
    all_planes = planes()
    prefault = Prefault(all_planes, NUM_PAGES)
    assert not any(map(ready_pages, all_planes))
    in_chunk = CHUNK // PAGE_BYTES
    for used in (1, in_chunk - 1, in_chunk + 1, 3 * in_chunk):
        prefault.reach(used)
        prefault.wait()
        for plane in all_planes:
            ready = ready_pages(plane)
            assert ready == list(range(len(ready)))
            # At least one chunk of the system behind the page; huge pages may add a part of another at each end.
            assert min(NUM_PAGES, used + 1 + in_chunk) <= len(ready) <= used + 1 + 4 * in_chunk


def test_all_of_a_cache_may_be_in_use_and_its_content_stays() -> None:
    all_planes = planes()
    prefault = Prefault(all_planes, NUM_PAGES)
    for page in range(NUM_PAGES):
        prefault.reach(page)
        for number, plane in enumerate(all_planes):
            plane[page] = number + 1
    prefault.wait()
    assert [plane.unique().tolist() for plane in all_planes] == [[1], [2], [3]]


def test_a_pass_that_takes_new_pages_has_the_next_ones_made_ready() -> None:
    shape = LayerShape(num_heads=2, key_dim=256, value_dim=256)
    storage = KVStorage([shape] * 2, NUM_PAGES, 32, torch.float32, torch.device("cpu"), reads_masked=False)
    storage.prepare([1], [])
    assert storage._prefault is not None
    storage._prefault.wait()
    for tensor in storage.tensors:
        assert tensor.nbytes == NUM_PAGES * PAGE_BYTES
        assert len(ready_pages(tensor)) >= 2 + CHUNK // PAGE_BYTES


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refused(address: int, length: int) -> bool:
        asked.append(address)
        return False

    monkeypatch.setattr("outrider.lm.prefault._populate", lambda: refused)
    all_planes = planes()
    prefault = Prefault(all_planes, NUM_PAGES)
    for page in range(NUM_PAGES):
        prefault.reach(page)
        prefault.wait()
    assert len(asked) == 1 and not any(map(ready_pages, all_planes))
