"""A check of the one kernel of vLLM by which sampled text goes wrong on CPUs, and what stands in for it there.

The rejection sampler spreads each request's temperature, top_k and top_p over its proposed tokens. vLLM's CPU builds
(0.22 to 0.32) compute them into a copy that is dropped, and divide by memory that nothing was written to: under
speculation, of any drafter, text above temperature 0 then does not have the target's distribution.
"""

import importlib
import logging
from typing import Any, Final

_LOG: Final = logging.getLogger(__name__)
_MODULE: Final = "vllm.v1.sample.rejection_sampler"


def repair_expansion() -> bool:
    """Check vLLM's expansion of sampling parameters; replace it where it is wrong. Return whether it was."""
    import torch

    module: Any = importlib.import_module(_MODULE)
    values, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6], dtype=torch.int32)
    expected = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0, 2.0])
    found = module.expand_batch_to_tokens(values, ends, 6, replace_from=0, replace_to=1)
    if torch.equal(found, expected):
        return False
    module.expand_batch_to_tokens = expanded
    _LOG.warning("outrider: this build of vLLM loses temperatures under speculation; PyTorch spreads them instead")
    return True


def expanded(values: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Return each request's value once for each of its tokens.

    Args:
        values: tensor [B], of any dtype.
        ends: tensor [B], integers: the number of tokens up to each request, itself included.
        num_tokens: N, the last of `ends`.
        replace_from: a value that is replaced.
        replace_to: what it becomes.

    Returns:
        A tensor [N] of the same dtype.
    """
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    spread = torch.repeat_interleave(values, counts, output_size=num_tokens)
    return torch.where(spread == replace_from, torch.full_like(spread, replace_to), spread)
