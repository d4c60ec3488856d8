"""What all tests share."""

import os
import signal

import pytest
import torch

# Models here are tiny: a second thread gains nothing, and beside other work each operation waits until it is scheduled.
# Services run with as many threads as they are told to; `tests/lm` tests what several threads compute.
torch.set_num_threads(1)

# As `packed_linear` sets it, whatever a test asks of oneDNN first.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A shell's background jobs ignore SIGINT, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not about them: what these expect of a model is what it does on a CPU."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
