"""Batch-invariant paged attention, registered with transformers as the attention implementation `outrider`.

A row's output is a function of its own query and of the keys and values at positions up to its own, in its own page
table, summed page by page (or block by block) in order of position. It does not depend on the other rows of a pass or
on later positions, so that a decode pass, a prefill chunk, a verification row and a replay produce equal bits;
`TransformersModel` checks this at every start.

Three kernels are batch-invariant: `native` (an operator of `outrider.native`, for x86-64 CPUs), `gpu` (by Triton), and
on CPUs `blocks` (plain PyTorch operations, for systems without a C++ compiler). `sdpa` is not, and is used if
invariance is turned off. The model passes the queries, keys and values of the new rows of all sessions in one tensor
each, and the pass as keyword argument.

Measured with PyTorch 2.13 on a CPU with AVX-512:

- bfloat16 linear layers gave equal bits for 4 to 1,000 rows on 1 and 2 threads; a single row differed for one of ten
  shapes.
- float32 linear layers on 2 threads gave other bits for 1 to 3, 5 to 7 and 9 to 11 rows (threads get fewer than 4
  rows each); with a multiple of 4 rows they are equal. So passes are padded to multiples of 4 rows; those of models
  all of whose weights are packed to an even number. A float32 router keeps multiples of 4.
- float32 attention products over blocks gave equal bits from 4 rows on, for any number of blocks. So the pages of
  `blocks` hold float32 on a CPU: twice the memory of bfloat16, 46 KB a token of SmolLM2-135M.
- The native product and the native attention have equal bits for any number of rows, by construction.
- On an H100 bfloat16 products of 1 to 96 rows gave equal bits, and those of 128 and of 192 rows others for layers with
  8,192 and 14,336 inputs; a row's place did not matter. In float32 the logits of a tiny model differed with the number
  of rows already from 1 on. So passes on a GPU always have as many (`gpu_passes`).
- Weights laid out once for oneDNN (`packed_linear`) give the bits of PyTorch's own bfloat16 linear layers. The kernel
  takes 6 rows at once: 4, 5 and 6 rows of a 16,384 x 2,048 layer take 3.0 ms, 7 take 3.9, 8 take 4.2, 16 take 6.0
  (one core). So the `padded_sizes` of such a model begin at 6 rows.

Every start probes the loaded model: a span at once, in parts behind rolled-back proposals, and as a kept side branch
of a tree must give the same bits. If they differ, `outrider info` shows `varying` instead of `invariant`; if they
differ by more than rounding, or a layer bypasses the attention interface, the model is refused, because its state
cannot be rolled back. Sliding windows and score caps are exact, since all keys are kept and the window is a mask;
attention sinks and recurrent states are refused.
"""

from outrider.lm.attention.blocks import BLOCK_LEN, BlockPass
from outrider.lm.attention.gpu_rows import GPU_BLOCK_LEN, GpuPass
from outrider.lm.attention.native import NativePass
from outrider.lm.attention.rows import MIN_ROWS, PassRows, lay_out_rows
from outrider.lm.attention.sdpa import SdpaPass
from outrider.lm.attention.shapes import ShapePass

__all__ = [
    "BLOCK_LEN",
    "GPU_BLOCK_LEN",
    "MIN_ROWS",
    "BlockPass",
    "GpuPass",
    "NativePass",
    "PassRows",
    "SdpaPass",
    "ShapePass",
    "lay_out_rows",
]
