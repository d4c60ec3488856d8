"""What all tests share."""

import torch

# Models here are tiny: a second thread gains nothing, and beside other work each operation waits until it is scheduled.
# Services run with as many threads as they are told to; `tests/lm` tests what several threads compute.
torch.set_num_threads(1)
