"""OpenMP's workers end when they are told to, come back with the next operator, and change no result."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from outrider.serving import openmp
from outrider.serving.openmp import end_workers

TIMEOUT_S = 10.0
ROWS = torch.arange(300_000, dtype=torch.float32).view(300, 1000)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def falls_below(num: int) -> bool:
    until = time.monotonic() + TIMEOUT_S
    while num_threads() >= num and time.monotonic() < until:
        time.sleep(0.001)
    return num_threads() < num


def test_workers_end_and_come_back() -> None:
    expected = ROWS.sin()
    for _ in range(3):
        with_workers = num_threads()
        end_workers()
        assert falls_below(with_workers)
        assert torch.equal(ROWS.sin(), expected)


def test_only_the_calling_threads_workers_end() -> None:
    has_run, may_end = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def run() -> None:
        found.append(ROWS.sin())
        has_run.set()
        may_end.wait(TIMEOUT_S)
        found.append(ROWS.sin())

    other = threading.Thread(target=run)
    other.start()
    assert has_run.wait(TIMEOUT_S)
    ROWS.sin()
    before = num_threads()
    end_workers()
    assert falls_below(before)
    assert num_threads() == before - 1
    may_end.set()
    other.join(TIMEOUT_S)
    assert not other.is_alive()
    assert torch.equal(*found)


def test_without_the_call_workers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_known", [])
    monkeypatch.setattr(openmp.ctypes, "CDLL", lambda name: object())
    ROWS.sin()
    before = num_threads()
    end_workers()
    assert num_threads() == before
