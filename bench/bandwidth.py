"""The memory bandwidth of a device, which limits decoding: each token reads all weights (roofline)."""

import time
from typing import Final

import torch

_CPU_BYTES: Final = 512 << 20
_GPU_BYTES: Final = 4 << 30
_NUM_RUNS: Final = 6


def read_bandwidth(device: torch.device) -> float:
    """Return bytes read per second: the best of 6 sums, by all threads, over a buffer larger than the caches."""
    size = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    # Written once, so that every page is backed by memory.
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    return max(size / _seconds(buffer) for _ in range(_NUM_RUNS))


def _seconds(buffer: torch.Tensor) -> float:
    started = time.perf_counter()
    # float() also waits for the result of a GPU.
    float(buffer.sum())
    return time.perf_counter() - started
