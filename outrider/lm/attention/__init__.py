"""Attention whose bits do not depend on how a position was computed: the transformers implementation `outrider`.

A row's output is a function of its own query and of the keys and values at positions up to its own, in its own table
of pages, summed page by page (or block by block) in order of position. Neither the other rows of a pass nor later
positions change it, so a decode pass, a prefill chunk, a verification row and a replay give equal bits;
`TransformersModel` probes it at every start.

Two kernels do it: `flex` (PyTorch's flex attention, compiled, the faster one) and `blocks` (plain PyTorch operations,
where there is no C++ compiler). A third, `sdpa`, gives it up for speed, where that was asked for. Each way the model
hands over the new rows' queries, keys and values, packed over all sessions, with the pass as keyword argument.
"""

import torch
from transformers import AttentionInterface

from outrider.errors import ModelUnsupported
from outrider.lm.attention.blocks import BLOCK_LEN, BlockPass
from outrider.lm.attention.flex import FlexPass, flex_attend
from outrider.lm.attention.rows import MIN_ROWS, PassRows, filled_rows, lay_out_rows
from outrider.lm.attention.sdpa import SdpaPass
from outrider.lm.attention.shapes import ShapePass

__all__ = [
    "BLOCK_LEN",
    "MIN_ROWS",
    "NAME",
    "BlockPass",
    "FlexPass",
    "PassRows",
    "SdpaPass",
    "ShapePass",
    "filled_rows",
    "lay_out_rows",
]

NAME = "outrider"


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    outrider_pass: BlockPass | FlexPass | SdpaPass | ShapePass,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface.

    Args:
        module: the attention layer; `ShapePass.attach` has given it its keys and values.
        query: [1, num_heads, rows, key_dim], all steps packed.
        key: [1, num_kv_heads, rows, key_dim].
        value: [1, num_kv_heads, rows, value_dim].
        attention_mask: unused; what a row sees follows from its position and table.
        outrider_pass: the layout of the rows.
        scaling: factor of the scores.
        sliding_window: a row sees this many positions, itself included; None for all.
        softcap: bound of the scores by tanh; None for none.
        s_aux: attention sinks, which these kernels do not have.

    Returns:
        Outputs [1, rows, num_heads, value_dim], and no weights.
    """
    if s_aux is not None:
        raise ModelUnsupported("the model uses attention sinks, which Outrider's attention does not have")
    # The compiler follows this function, and a type is what it can decide on.
    if isinstance(outrider_pass, FlexPass):
        return flex_attend(module, query, key, value, outrider_pass, scaling, sliding_window, softcap), None
    return outrider_pass.attend(module, query, key, value, scaling, sliding_window, softcap), None


AttentionInterface.register(NAME, _attend)
