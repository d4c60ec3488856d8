"""The attention implementation `outrider` of transformers; see `outrider.lm.attention`.

Importing it takes seconds, as importing any model of transformers does: drafts that need none leave it out.
"""

import torch
from transformers import AttentionInterface

from outrider.errors import ModelUnsupported
from outrider.lm.attention import native
from outrider.lm.attention.blocks import BlockPass
from outrider.lm.attention.gpu_rows import GpuPass
from outrider.lm.attention.native import NativePass
from outrider.lm.attention.sdpa import SdpaPass
from outrider.lm.attention.shapes import ShapePass

NAME = "outrider"


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    outrider_pass: BlockPass | GpuPass | NativePass | SdpaPass | ShapePass,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface.

    Args:
        module: the attention layer, with the keys and values that `ShapePass.attach` assigned.
        query: [1, num_heads, rows, key_dim], the rows of all steps concatenated.
        key: [1, num_kv_heads, rows, key_dim].
        value: [1, num_kv_heads, rows, value_dim].
        attention_mask: unused; the keys that a row attends to follow from its position and page table.
        outrider_pass: the layout of the rows.
        scaling: factor of the scores.
        sliding_window: number of positions that a row attends to, its own included; None for all.
        softcap: bound of the scores, applied by tanh; None for none.
        s_aux: attention sinks, which these kernels do not support.

    Returns:
        Outputs [1, rows, num_heads, value_dim], and None for the attention weights.

    Raises:
        ModelUnsupported: the model uses attention sinks, or a score bound with the `sdpa` kernel.
    """
    if s_aux is not None:
        raise ModelUnsupported("the model uses attention sinks, which Outrider's attention does not support")
    # torch.compile traces this function, and can branch on types.
    if isinstance(outrider_pass, NativePass):
        return native.attend(module, query, key, value, outrider_pass, scaling, sliding_window, softcap), None
    if isinstance(outrider_pass, GpuPass):
        # Triton is there on machines with a GPU only.
        from outrider.lm.attention import gpu

        return gpu.attend(module, query, key, value, outrider_pass, scaling, sliding_window, softcap), None
    return outrider_pass.attend(module, query, key, value, scaling, sliding_window, softcap), None


AttentionInterface.register(NAME, _attend)
