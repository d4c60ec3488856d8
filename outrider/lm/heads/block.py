"""A head that drafts a whole block in one pass: EAGLE-3's layer over mask rows, and a transition between their tokens.

EAGLE-3 (`eagle3`) runs once for each depth of a proposal. Here the rows of all depths run at once, as in P-EAGLE (Hui
et al. 2026) and DFlash (Chen et al. 2026): the last column, which predicts the first token, and behind it a mask row
for each further token. A mask row has learned vectors where no one knows token and feature yet: its embedding is m_k,
its feature that of the last column plus f_k. It attends to all columns and to the mask rows before it, so that fewer
rows change nothing in the others.

What one pass cannot know is which token is taken at each place, and without that siblings do not fit their parents. So
the logits of the token after x at depth k are U_k + W2 silu(W1 E[x] + W3 h_k): U_k = W h_k are those of the row, E are
the target's embeddings (DSpark, arXiv 2607.05147, section 3, has U_k + W2 W1[x]). For every node of a tree it is a
lookup and two small products.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.lm.heads.eagle3 import EVERY_COLUMN, Eagle3Config, Eagle3Head, chain_attention


@dataclass(frozen=True)
class BlockConfig:
    """The configuration of a head.

    Attributes:
        eagle3: of the layer, the features and the vocabulary.
        block_size: tokens that a pass predicts, at least 1.
        rank: width of the transition.
    """

    eagle3: Eagle3Config
    block_size: int
    rank: int


class Transition(nn.Module):
    """What the token before adds to the logits at a place; nothing before training.

    Args:
        hidden_size: H, of embeddings and states.
        rank: of the bias.
        draft_vocab_size: D.
    """

    def __init__(self, hidden_size: int, rank: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.token = nn.Linear(hidden_size, rank, bias=False)
        self.state = nn.Linear(hidden_size, rank, bias=False)
        self.output = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Return the additions to the logits, [..., D], after tokens with these embeddings, in states: [..., H]."""
        added: Tensor = self.output(functional.silu(self.token(embeddings) + self.state(states)))
        return added


class BlockHead(Eagle3Head):
    """The head: an EAGLE-3 head whose weights have their published names, and what a block needs beside it.

    Attributes:
        mask_embeddings: of the mask rows: [block_size - 1, H].
        mask_features: added to the feature of the last column: [block_size - 1, H].
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.eagle3)
        self.block = config
        hidden_size = config.eagle3.layer.hidden_size
        self.mask_embeddings = nn.Parameter(torch.zeros(config.block_size - 1, hidden_size))
        self.mask_features = nn.Parameter(torch.zeros(config.block_size - 1, hidden_size))
        self.transition = Transition(hidden_size, config.rank, config.eagle3.draft_vocab_size)

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return the logits of the draft's tokens: [..., D].

        Args:
            states: normalised outputs of rows: [..., H].
            previous: embeddings of the tokens before those that are predicted: [..., H].
        """
        logits: Tensor = self.lm_head(states) + self.transition(previous, states)
        return logits

    def unroll(self, features: Tensor, embeddings: Iterable[Tensor], columns: slice = EVERY_COLUMN) -> Iterator[Tensor]:
        """Run a block at N of T columns, as in training.

        Args:
            features: features of positions 0 .. T - 1: [B, T, 3 * target_hidden_size].
            embeddings: of tokens 1 .. T: [B, T, H]; only the first is used.
            columns: which N columns; the others are only attended to.

        Yields:
            For each row k of the blocks, normalised outputs [B, N, H]; `logits` of column t predict token t + k + 2.
        """
        anchors = next(iter(embeddings))
        batch, length, _ = anchors.shape
        hidden = self.fc(features)
        positions = torch.arange(length, device=features.device)[None]
        query, key, value, residual = self.midlayer.project(anchors, hidden, self.rotary(hidden, positions))
        past = (key, value)
        attended = chain_attention(query[:, :, columns], [past], columns)
        yield self.norm(self.midlayer.finish(attended, residual[:, columns]))
        num = self.block.block_size - 1
        if not num:
            return

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own = list(zip(torch.split(key, batch), torch.split(value, batch), strict=True))
            parts = enumerate(torch.split(query, batch))
            return torch.cat([chain_attention(part, [past, *own[: row + 1]], columns) for row, part in parts])

        hidden, positions = hidden[:, columns], positions[:, columns]
        embedded = self.mask_embeddings.repeat_interleave(batch, 0)[:, None].expand(-1, hidden.shape[1], -1)
        masked = hidden.repeat(num, 1, 1) + self.mask_features.repeat_interleave(batch, 0)[:, None]
        positions = torch.cat([positions + 1 + row for row in range(num)]).repeat_interleave(batch, 0)
        outputs = self.midlayer(embedded, masked, self.rotary(masked, positions), attend)
        yield from torch.split(self.norm(outputs), batch)
