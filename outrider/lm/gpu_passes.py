"""Passes on a GPU: each runs as parts of the same number of rows, replayed as one CUDA graph.

Every operation of a part has one shape, and so one kernel, which computes each row alike wherever it stands: a
position's bits do not depend on the pass, as long as a row's output depends on no other row of its part. Up to
`NUM_ROWS` rows cost as much as one, since a pass is bound by reading the weights.

Starting a kernel takes a CPU longer than a GPU takes to run it. A graph starts all kernels of a part at once.
"""

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import torch

from outrider.cache import cache_dir
from outrider.lm.attention.gpu_rows import GpuPass, describe
from outrider.lm.attention.rows import PassRows
from outrider.lm.features import FeatureStore
from outrider.lm.pass_plan import PassPlan

_LOG: Final = logging.getLogger(__name__)
NUM_ROWS: Final = 128
"""Rows of a part. An H100 multiplies a layer of 14,336 x 4,096 with 1 and with 128 rows in 0.07 ms."""
_NUM_NUMBERS: Final = 1 << 16
_WARM_UPS: Final = 2

Run = Callable[[torch.Tensor, torch.Tensor, GpuPass], torch.Tensor]


def make_gpu_passes(
    run: Run, features: FeatureStore, page_len: int, device: torch.device, *, captures: bool
) -> "GpuPasses | None":
    """Return what runs a model's passes on a GPU, once it has run; None, with a warning, where it cannot.

    Args:
        run: see `GpuPasses`.
        features: of the model.
        page_len: positions per page.
        device: the GPU.
        captures: whether passes may be replayed as graphs.

    Raises:
        torch.OutOfMemoryError: there is no room for a pass.
    """
    passes = GpuPasses(run, page_len, device, captures=captures)
    try:
        if "TRITON_CACHE_DIR" not in os.environ:
            # By default it is below the home directory, which containers may not have.
            os.environ["TRITON_CACHE_DIR"] = str(cache_dir() / "triton")
        passes.run(PassPlan(PassRows(1, [], [], []), [], [], [0], [0], []), features)
    except torch.OutOfMemoryError:
        # Not to be served with other numerics instead.
        raise
    except Exception as error:  # Triton's, its compiler's and CUDA's errors have no class in common
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        _LOG.warning("attention runs without its kernels for GPUs, many times slower, and bits vary: %s", reason)
        return None
    return passes


class GpuPasses:
    """Runs the passes of a model.

    Args:
        run: runs the model on token ids and positions, int64 [1, NUM_ROWS]; returns logits [NUM_ROWS, V].
        page_len: positions per page.
        device: the GPU.
        captures: whether passes may be replayed as graphs.
    """

    def __init__(self, run: Run, page_len: int, device: torch.device, *, captures: bool) -> None:
        self._model = run
        self._page_len = page_len
        self._device = device
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0, device=device)
        self._features: dict[int, torch.Tensor] = {}
        self._captures = captures
        self._reserve(_NUM_NUMBERS)

    @torch.no_grad()
    def run(self, plan: PassPlan, features: FeatureStore) -> torch.Tensor:
        """Run a pass and store its features; return the logits of the wanted rows, [wanted, V]."""
        # Triton starts kernels on the thread's current device; a model is loaded in another thread than it runs in.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            found = [self._run_part(part, features) for part in plan.parts(NUM_ROWS)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _run_part(self, part: PassPlan, features: FeatureStore) -> torch.Tensor:
        numbers = describe(NUM_ROWS, part.token_ids, part.positions, part.rows)
        self._reserve(len(numbers))
        self._numbers[: len(numbers)].copy_(torch.frombuffer(numbers, dtype=torch.int32))
        logits = self._replayed(features)
        features.write(part.rows)
        # A copy, since the next part overwrites them.
        return logits[torch.tensor(part.wanted, dtype=torch.int64, device=self._device)]

    def _replayed(self, features: FeatureStore) -> torch.Tensor:
        """Run a part; return its logits, [NUM_ROWS, V], and leave its features with their store."""
        if self._graph is not None and tuple(self._features) != features.layers:
            self._graph = None
        if self._graph is None and self._captures:
            self._captures = self._capture(features)
        if self._graph is None:
            return self._run()
        self._graph.replay()
        features.hold(self._features)
        return self._logits

    def _capture(self, features: FeatureStore) -> bool:
        """Record the operations of a part; return False, without a graph, where that fails."""
        before = torch.cuda.current_stream(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                # They write what the part itself will write. The first compiles what is not yet compiled.
                for _ in range(_WARM_UPS):
                    self._run()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._logits = self._run()
            self._features = features.taken()
            self._graph = graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(before)
            reason = next(iter(str(error).strip().splitlines()), "no reason")
            _LOG.warning("passes run without a CUDA graph, and are slower: %s", reason)
            return False
        return True

    def _run(self) -> torch.Tensor:
        token_ids, positions = self._numbers[: 2 * NUM_ROWS].view(2, 1, NUM_ROWS).long()
        return self._model(token_ids, positions, GpuPass(self._numbers, self._page_len))

    def _reserve(self, num: int) -> None:
        """Have room for so many numbers; the graph reads them where they are."""
        if num <= len(self._numbers):
            return
        self._graph = None
        size = 1 << (num - 1).bit_length()
        self._numbers = torch.zeros(size, dtype=torch.int32, device=self._device)
        nothing = describe(NUM_ROWS, [0], [0], PassRows(0, [], [], []))
        self._numbers[: len(nothing)].copy_(torch.frombuffer(nothing, dtype=torch.int32))
