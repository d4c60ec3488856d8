"""Native operators for CPUs, built once from the C++ sources beside this file.

`packed_product` multiplies bfloat16 rows with bfloat16 weights in float32. Each output is one chain of additions in
order of the inputs, so its bits depend on its row and its weights only: not on the number of rows or on threads.
`pack_weight` lays the weights out for it, and compresses them without loss: a pass of a few rows takes about as long as
reading them. They lie in pages of 2 MiB (`outrider.native.memory`).

`paged_attention` writes the new keys and values of a pass to their pages, then attends. An output's bits depend on its
row and on what it sees only: keys and values are added in order of position.

`race_candidates` finds the few tokens that can win the race of a sampled row (`outrider.speculation.draws`), by bounds
of their weight and noise, nearly always one; of several the winner is then found exactly, with the bits of a race of
all.

`places_of_largest` finds the largest score of each row.

`uniform_noise` makes the keyed random numbers of many tokens (`outrider.speculation.randomness`), with the same bits.

The others are for drafts, which need not be exact. `largest_scores` finds the largest scores of rows, and about what
share each has of the sum; `drawn_scores` scores the tokens of a race by approximate noise. `byte_product` multiplies
rows with packed weights, both in 8 bits, in exact sums. `head_columns` runs a head's layer over new columns of
sessions; `head_project`, `head_finish`, `head_logits` and `transition_logits` are the other parts of its pass
(`outrider.lm.heads.passes`): a head is so small that the way into an operator takes as long as a product. `head_trees`
grows the trees of a block head from its outputs to their ends (`outrider.drafters.grown_tree`).

Which variant runs follows from the CPU's features (`Variant`). All have equal results, but for AMX: its instruction
adds up 32 inputs by itself, so that `packed_product`, and attention in bfloat16, have another order of additions.
"""

import functools
import logging
from enum import IntEnum
from pathlib import Path
from typing import Final

import torch

from outrider.native.build import ensure_library
from outrider.native.memory import WEIGHTS

_LOG: Final = logging.getLogger(__name__)
_COLUMNS: Final = 16
MOST_BYTE_INPUTS: Final = 65536
"""Inputs of a product in 8 bits, at most: the sums are of 32 bits."""
SCORE_TYPES: Final = (torch.bfloat16, torch.float32)
"""Of the scores that operators find the largest of."""
_QUAD: Final = 4
_LARGEST_BYTE: Final = 127
_BYTE_OFFSET: Final = 128


class Variant(IntEnum):
    """The instruction set of an operator; a CPU that has one has those before it too."""

    AVX2 = 0
    AVX512 = 1
    AVX512_BF16 = 2
    AMX = 3


@functools.cache
def best_variant() -> Variant | None:
    """Return the fastest variant that this CPU can run; None where the operators cannot be had here.

    The first call builds the library, where that has not been done (some seconds, with a line on standard error), and
    loads it.
    """
    try:
        library = ensure_library()
        return None if library is None else _loaded(library)
    except OSError as error:
        _LOG.warning("no native operators, products take up to twice as long: %s", error)
        return None


def loaded_variant() -> Variant | None:
    """Return what `best_variant` returned, if it was called; None until then: nothing is built in between."""
    return best_variant() if best_variant.cache_info().currsize else None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, bfloat16 [out_features, in_features], as `packed_product` reads it.

    Returns:
        uint8 [N], where N follows from the sizes. Nearly all weights of a model take 12 bits in place of 16, without
        loss (see `packed_weight.h`), and the rest of the memory is that of other weights.
    """
    packed: torch.Tensor = torch.ops.outrider.pack_weight(weight)
    return WEIGHTS.place(packed, torch.ops.outrider.written_bytes(packed))


def pack_bytes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in 8 bits, as `byte_product` reads it, in half of the memory of bfloat16.

    Args:
        weight: [out_features, in_features], at most `MOST_BYTE_INPUTS` inputs.

    Returns:
        uint8 [blocks, quads, 16, 4], and the scales of the outputs, float32 [blocks, 16]. A weight is the nearest
        multiple of its output's scale, 127 of which are the largest of the output's weights; 128 is added, so that it
        is stored without a sign. Of blocks of 16 outputs, quad by quad of inputs, there are the weights of all outputs;
        what is missing in the last block or quad is zero.
    """
    num_out, num_in = weight.shape
    given = weight.float()
    scales = given.abs().amax(1) / _LARGEST_BYTE if num_in else given.new_zeros(num_out)
    rounded = (given / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    blocks, quads = -(-num_out // _COLUMNS), -(-num_in // _QUAD)
    padded = given.new_zeros(blocks * _COLUMNS, _QUAD * quads)
    padded[:num_out, :num_in] = rounded
    packed = (padded + _BYTE_OFFSET).to(torch.uint8).view(blocks, _COLUMNS, quads, _QUAD).permute(0, 2, 1, 3)
    padded_scales = scales.new_zeros(blocks * _COLUMNS)
    padded_scales[:num_out] = scales
    return WEIGHTS.place(packed.contiguous(), packed.numel()), padded_scales.view(-1, _COLUMNS)


def _loaded(library: Path) -> Variant | None:
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    number = torch.ops.outrider.best_variant()
    if number < 0:
        _LOG.warning("no native operators: this CPU has no AVX2")
        return None
    torch.library.register_fake("outrider::packed_product", _product_shape)
    torch.library.register_fake("outrider::paged_attention", _attention_shape)
    return Variant(number)


def _product_shape(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    variant: int,
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], out_features)


def _attention_shape(query: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], new_values.shape[3])
