"""Attention whose bits do not depend on how a position was computed.

A row's output is a function of its own query and of the keys and values at positions up to its own (for a proposal
tree: on its own branch), in blocks of `BLOCK_LEN` positions counted from 0:

    scores and weights in float32; the weighted values of each block summed by one matrix product of fixed shape;
    the blocks added one after another in order of position.

Later blocks only add exact zeros and the number of rows does not change a row's sums, so a decode pass, a prefill
chunk, a verification row and a replay give equal bits. Measured for CPU (float32 products of at least `MIN_ROWS` rows,
any number of blocks); `TransformersModel` probes it at every start.

It is plugged into transformers as attention implementation `outrider`: the model hands over the new rows' queries, keys
and values, packed over all sessions, with the pass (an `AttentionPass`) as keyword argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

from outrider.errors import ModelUnsupported
from outrider.lm.kv_cache import BLOCK_LEN, BlockKVCache
from outrider.lm.model import SessionStep
from outrider.tokens import ROOT, ProposalTree

NAME = "outrider"
MIN_ROWS = 4
"""Fewest rows of a matrix product: fewer take another kernel, with other bits."""


@dataclass(slots=True)
class Branch:
    """Rows that see the same keys: a path of the tree, and the rows on it that no earlier branch has computed.

    Attributes:
        path: node numbers from a child of the root; empty nodes of the main line stand in the cache already.
        in_place: whether the cache itself holds the branch, so that no copy is needed.
        rows: indices of the rows within the step.
        positions: their session positions.
    """

    path: tuple[int, ...]
    in_place: bool
    rows: torch.Tensor
    positions: torch.Tensor
    biases: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Blocks up to the last row's position."""
        return int(self.positions[-1]) // BLOCK_LEN + 1

    def bias(self, group: int, window: int | None) -> torch.Tensor:
        """Returns 0 where a row sees a key and -inf elsewhere: float32 [num_blocks, 1, group * rows, BLOCK_LEN]."""
        if (group, window) not in self.biases:
            keys = torch.arange(self.num_blocks * BLOCK_LEN, device=self.positions.device)
            rows = self.positions.repeat(group).unsqueeze(1)
            seen = keys <= rows if window is None else (keys <= rows) & (keys > rows - window)
            bias = torch.zeros(seen.shape, device=keys.device).masked_fill_(~seen, float("-inf"))
            self.biases[group, window] = bias.view(-1, self.num_blocks, 1, BLOCK_LEN).permute(1, 2, 0, 3).contiguous()
        return self.biases[group, window]


@dataclass(slots=True)
class StepRows:
    """Where one step's rows stand in the packed pass, and which branches they form."""

    cache: BlockKVCache
    first_row: int
    num_rows: int
    start: int
    span_end: int
    main_rows: int
    main_order: torch.Tensor | None
    side_rows: torch.Tensor | None
    branches: list[Branch]


@dataclass(slots=True)
class AttentionPass:
    """One pass over the rows of several sessions; counts the layers that came by."""

    steps: list[StepRows]
    layers_seen: set[int] = field(default_factory=set)


def plan(steps: Sequence[SessionStep], device: torch.device) -> AttentionPass:
    """Lays out the rows of all steps, span first, then nodes in order of their numbers, and tells the caches."""
    rows: list[StepRows] = []
    first = 0
    for step in steps:
        rows.append(_step_rows(step, first, device))
        first += step.num_rows
    return AttentionPass(rows)


def _main_line(tree: ProposalTree) -> tuple[int, ...]:
    line: list[int] = []
    children = tree.children(ROOT)
    while children:
        line.append(children[0])
        children = tree.children(children[0])
    return tuple(line)


def _step_rows(step: SessionStep, first_row: int, device: torch.device) -> StepRows:
    if not isinstance(step.cache, BlockKVCache):
        raise TypeError("the cache was made by another model class")
    tree, span = step.tree, step.span
    main = _main_line(tree)
    side = [number for number in range(1, len(tree) + 1) if number not in set(main)]
    step.cache.begin(span.end, main, side)
    num_span = len(span.token_ids)
    main_indices = [*range(num_span), *(num_span + number - 1 for number in main)]
    branches = [_branch(main, True, main_indices, range(span.start, span.end + len(main)), device)]
    branches += _side_branches(tree, set(main), num_span, span.end, device)
    is_contiguous = main_indices == list(range(len(main_indices)))
    return StepRows(
        cache=step.cache,
        first_row=first_row,
        num_rows=step.num_rows,
        start=span.start,
        span_end=span.end,
        main_rows=len(main_indices),
        main_order=None if is_contiguous else torch.tensor(main_indices, device=device),
        side_rows=torch.tensor([num_span + number - 1 for number in side], device=device) if side else None,
        branches=branches,
    )


def _side_branches(
    tree: ProposalTree, done: set[int], num_span: int, span_end: int, device: torch.device
) -> list[Branch]:
    branches = []
    for leaf in range(1, len(tree) + 1):
        path = tree.path(leaf)
        if leaf in done or tree.children(leaf):
            continue
        fresh = [number for number in path if number not in done]
        done.update(fresh)
        indices = [num_span + number - 1 for number in fresh]
        positions = [span_end + tree.depth(number) - 1 for number in fresh]
        branches.append(_branch(path, False, indices, positions, device))
    return branches


def _branch(
    path: tuple[int, ...], in_place: bool, rows: Sequence[int], positions: Sequence[int], device: torch.device
) -> Branch:
    # Repeating the last row keeps the matrix products at MIN_ROWS rows; the repetitions write the same result again.
    missing = max(0, MIN_ROWS - len(rows))
    padded_rows = [*rows, *[rows[-1]] * missing]
    padded_positions = [*positions, *[positions[-1]] * missing]
    return Branch(
        path, in_place, torch.tensor(padded_rows, device=device), torch.tensor(padded_positions, device=device)
    )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    outrider_pass: AttentionPass,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface.

    Args:
        module: the attention layer; `layer_idx` names it.
        query: [1, num_heads, rows, head_dim], all steps packed.
        key: [1, num_kv_heads, rows, head_dim].
        value: [1, num_kv_heads, rows, value_dim].
        attention_mask: unused; what a row sees follows from its position and branch.
        outrider_pass: the layout of the rows.
        scaling: factor of the scores.
        sliding_window: a row sees this many positions, itself included; None for all.
        softcap: bound of the scores by tanh; None for none.
        s_aux: attention sinks, which this kernel does not have.

    Returns:
        Outputs [1, rows, num_heads, value_dim], and no weights.
    """
    if s_aux is not None:
        raise ModelUnsupported("the model uses attention sinks, which Outrider's attention does not have")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    outrider_pass.layers_seen.add(layer)
    output = query.new_zeros(query.shape[2], query.shape[1], value.shape[3])
    scaled = query[0].float() * scaling
    for step in outrider_pass.steps:
        rows = slice(step.first_row, step.first_row + step.num_rows)
        _store(step, layer, key[0, :, rows], value[0, :, rows])
        for branch in step.branches:
            output[step.first_row + branch.rows] = _branch_output(
                step, branch, layer, scaled[:, rows], sliding_window, softcap
            ).to(query.dtype)
    return output.unsqueeze(0), None


def _store(step: StepRows, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    order = step.main_order
    main = (rows[:, : step.main_rows] if order is None else rows[:, order] for rows in (keys, values))
    step.cache.write(layer, step.start, *main)
    if step.side_rows is not None:
        step.cache.put_aside(layer, keys[:, step.side_rows], values[:, step.side_rows])


def _branch_output(
    step: StepRows, branch: Branch, layer: int, query: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Returns the outputs [rows, num_heads, value_dim] float32 of a branch's rows; `query` is [num_heads, rows, D]."""
    if branch.in_place:
        keys, values = step.cache.blocks(layer, branch.num_blocks)
    else:
        keys, values = step.cache.branch_blocks(layer, branch.num_blocks, branch.path, step.span_end)
    num_kv_heads = keys.shape[1]
    group = query.shape[0] // num_kv_heads
    # Query heads that share a key head become rows of one product, so keys are never repeated.
    grouped = query[:, branch.rows].reshape(num_kv_heads, group * len(branch.rows), -1)
    summed = block_attention(grouped, keys, values, branch.bias(group, window), softcap)
    return summed.view(num_kv_heads, group, len(branch.rows), -1).permute(2, 0, 1, 3).flatten(1, 2)


def block_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Returns softmax(query keys + bias) values, summed block by block in order of position.

    Args:
        query: float32 [H, R, D], scaled; R at least `MIN_ROWS`.
        keys: [num_blocks, H, BLOCK_LEN, D], any floating dtype.
        values: [num_blocks, H, BLOCK_LEN, E].
        bias: float32 [num_blocks, 1, R, BLOCK_LEN], 0 or -inf; every row sees at least one key.
        softcap: bound of the scores by tanh; None for none.

    Returns:
        float32 [H, R, E].
    """
    scores = torch.matmul(query, keys.float().transpose(-1, -2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores += bias
    # A maximum is exact in any order, so taking it over all blocks at once keeps a row independent of their number.
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True).amax(dim=0)).exp_()
    parts = torch.matmul(weights, values.float())
    totals = weights.sum(dim=-1, keepdim=True)
    output, total = parts[0], totals[0]
    for part, block_total in zip(parts[1:], totals[1:], strict=True):
        output = output + part
        total = total + block_total
    return output / total


AttentionInterface.register(NAME, _attend)
