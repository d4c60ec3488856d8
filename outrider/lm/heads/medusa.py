"""Medusa's heads (Cai et al. 2024): from the target's last hidden state each guesses one of the tokens after next."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional


class ResBlock(nn.Module):
    """x + SiLU(W x + b); the identity before it is trained."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [..., H] for [..., H]."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Residual heads over one output layer.

    Args:
        hidden_size: H of the target.
        num_heads: tokens guessed.
        draft_vocab_size: tokens that the heads can say.
    """

    def __init__(self, hidden_size: int, num_heads: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(ResBlock(hidden_size) for _ in range(num_heads))
        self.lm_head = nn.Linear(hidden_size, draft_vocab_size, bias=False)

    def unroll(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yields for head k what `lm_head` takes: [..., H]; from the state of position t it guesses token t + k + 2.

        Args:
            hidden: the target's last hidden states, normalised: [..., H].
        """
        for head in self.heads:
            yield head(hidden)
