"""Probes of a loaded model: its state must roll back, and bits must not depend on how a position was computed."""

from typing import Final

import torch

from outrider.errors import ModelUnsupported
from outrider.lm.model import LanguageModel, SessionStep
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan

PROBE_LEN: Final = 48
"""More rows than oneDNN multiplies by one kernel: where there is AMX, another one begins at 33."""
_TOLERANCE: Final = 0.05


def has_equal_bits(model: LanguageModel, vocabulary_size: int) -> bool:
    """Run tokens in one pass, in parts with dropped proposals, and as an accepted side branch; compare the logits.

    Args:
        model: model to probe.
        vocabulary_size: V of the model.

    Returns:
        Whether the logits of the last token are equal bit for bit.

    Raises:
        ModelUnsupported: they differ by more than 5 % of the largest logit: the model has state that cannot roll back.
    """
    span = tuple(3 + index % (vocabulary_size - 3) for index in range(PROBE_LEN))
    cache = model.new_cache()
    whole = model.forward([SessionStep(cache, TokenSpan(0, span))])[0][0]
    cache.release()
    others = (_run_in_parts(model, span), run_as_branch(model, span))
    if not all(is_close(other, whole) for other in others):
        raise ModelUnsupported("the model keeps state that does not roll back with its KV cache")
    return all(torch.equal(other, whole) for other in others)


def is_close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits differ by no more than rounding: 5 % of the largest."""
    return bool((logits - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def run_as_branch(model: LanguageModel, span: tuple[int, ...]) -> torch.Tensor:
    """Return the logits [V] of the last token of a span whose last two tokens are run as a side branch of a tree."""
    cache = model.new_cache()
    tree = _tree([(0, 1), (0, span[-2]), (1, 2), (2, span[-1]), (2, 2)])
    logits = model.forward([SessionStep(cache, TokenSpan(0, span[:-2]), tree)])[0]
    cache.keep((2, 4))
    cache.truncate(len(span) - 1)
    again = model.forward([SessionStep(cache, TokenSpan(len(span) - 1, span[-1:]))])[0][0]
    cache.release()
    return logits[4] if torch.equal(logits[4], again) else again


def _run_in_parts(model: LanguageModel, span: tuple[int, ...]) -> torch.Tensor:
    cache = model.new_cache()
    for start, end in ((0, 5), (5, 6), (6, 9), (9, len(span))):
        dropped = _tree([(0, 1), (1, 2), (0, 2)])
        logits = model.forward([SessionStep(cache, TokenSpan(start, span[start:end]), dropped)])[0]
        cache.keep(())
    cache.release()
    return logits[0]


def _tree(edges: list[tuple[int, int]]) -> ProposalTree:
    tree = ProposalTree()
    for parent, token_id in edges:
        tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree
