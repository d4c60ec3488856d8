"""Medusa's heads (Cai et al. 2024): each predicts one of the following tokens from the target's last hidden state."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional


class ResBlock(nn.Module):
    """A residual block, x + SiLU(W x + b); W and b are 0 before training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the outputs [..., H] for inputs [..., H]."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Residual blocks that share one output layer.

    Args:
        hidden_size: H of the target.
        num_heads: number of tokens predicted.
        draft_vocab_size: size of the draft's vocabulary.
    """

    def __init__(self, hidden_size: int, num_heads: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(ResBlock(hidden_size) for _ in range(num_heads))
        self.lm_head = nn.Linear(hidden_size, draft_vocab_size, bias=False)

    def unroll(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield, for each head k, the input of `lm_head`: [..., H]; the state of position t predicts token t + k + 2.

        Args:
            hidden: the target's last hidden states, after the final norm: [..., H].
        """
        for head in self.heads:
            yield head(hidden)
