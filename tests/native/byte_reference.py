"""What products in 8 bits are by definition."""

import torch

from outrider import native


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows as integers, the largest of each being 127, and their scales: [N, K] and [N, 1], float32."""
    tops = rows.float().abs().amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1).float()
    largest = torch.tensor(127.0)  # a division by a number would be a product with its reciprocal
    inverse = torch.where(tops > 0, largest / tops, 0.0)
    return (rows.float() * inverse).round(), tops / largest


def unpacked(packed: torch.Tensor, num_out: int, num_in: int) -> torch.Tensor:
    """Returns the integers of a packed weight: float32 [num_out, num_in]."""
    numbers = packed.permute(0, 2, 1, 3).reshape(16 * len(packed), -1)[:num_out, :num_in]
    return numbers.float() - 128


def byte_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the product of bfloat16 rows and a weight, float32: its sums are exact."""
    integers, row_scales = rounded(rows)
    packed, scales = native.pack_bytes(weight)
    sums = integers.double() @ unpacked(packed, *weight.shape).double().T
    products = sums.float() * (scales.flatten()[: len(weight)] * row_scales)
    return products if bias is None else products + bias.float()
