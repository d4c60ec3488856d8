"""Rounds judged together: each session's result is what it is alone, under either rule."""

import random
from typing import Any, cast

import pytest
import torch

from outrider.experience import Experience
from outrider.lm.model import KVCache
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.randomness import KeyedSource
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, TokenOrigin
from target_service.rounds import Round, decide, decide_all
from target_service.sessions import Request, Resident
from target_service.speculation import Speculation, SpeculationTerms
from target_service.stream import Stream

V = 12
MAX_LEN = 60

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "logprobs": 0},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 5},
    {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 8},
    {"top_p": 0.6, "max_tokens": 7},
]


def request_of(draw: random.Random) -> Request:
    parameters = SamplingParameters(**draw.choice(PARAMETERS), seed=draw.getrandbits(64))
    rule = draw.choice(list(AcceptanceRule))
    # Judging a round touches neither the stream nor the cache.
    resident = Resident("", cast(KVCache, None), [draw.randrange(V) for _ in range(10)])
    return Request(
        number=1,
        stream=cast(Stream, None),
        handle=0,
        resident=resident,
        fencing_token=1,
        parameters=parameters,
        rule=rule,
        prompt_len=5,
        stop_token_ids=frozenset({V - 1}),
        start_len=5,
        window_end=draw.choice([12, MAX_LEN]),
        source=KeyedSource(parameters.seed or 0),
        speculation=Speculation(SpeculationTerms(), rule, Experience(), 64, adapts=True),
    )


def tree_of(draw: random.Random) -> ProposalTree:
    tree = ProposalTree()
    for _ in range(draw.randrange(12)):
        parent, token_id = draw.randrange(len(tree) + 1), draw.randrange(V)
        if tree.child(parent, token_id) is None:
            tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree


def rounds_of(draw: random.Random, num: int) -> list[Round]:
    rounds: list[Round] = []
    first_row = draw.randrange(3)  # rows of no session may stand anywhere
    for _ in range(num):
        rounds.append(Round(request_of(draw), first_row, tree_of(draw)))
        first_row += 1 + len(rounds[-1].tree) + draw.randrange(2)
    return rounds


@pytest.mark.parametrize("seed", range(40))
def test_rounds_judged_together_are_those_judged_alone(seed: int) -> None:
    draw = random.Random(seed)
    rounds = rounds_of(draw, draw.choice([1, 2, 5, 33]))
    logits = torch.randn(800, V, generator=torch.Generator().manual_seed(seed)) * 2
    results = decide_all(rounds, logits, MAX_LEN)
    assert results == [
        decide(item.request, logits[item.first_row : item.first_row + 1 + len(item.tree)], item.tree, MAX_LEN)
        for item in rounds
    ]
    for item, result in zip(rounds, results, strict=True):
        asks = item.request.parameters.logprobs is not None
        assert len(result.logprobs) == (len(result.token_ids) if asks else 0)
        assert len(result.token_ids) == len(result.origins) <= item.request.window_end - 10


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_does_not_change_what_coupled_outputs(seed: int) -> None:
    """Logits depend on the depth alone, so that every branch meets the same."""
    draw = random.Random(seed)
    request, tree = request_of(draw), ProposalTree()
    request.rule, request.window_end = AcceptanceRule.COUPLED, MAX_LEN
    request.parameters = SamplingParameters(repetition_penalty=1.2)
    logits = torch.randn(30, V, generator=torch.Generator().manual_seed(seed))
    plain: list[int] = []
    for step in range(5):
        plain += decide(request, logits[step : step + 1], ProposalTree(), MAX_LEN).token_ids
        request.resident.token_ids.append(plain[-1])
    del request.resident.token_ids[10:]
    for parent, token_id in enumerate(plain[:4]):
        tree.append(ProposalNode(parent, token_id))
    if plain[0] != 0:
        tree.append(ProposalNode(ROOT, 0, NodeKind.GUESSED))
    result = decide(request, torch.cat((logits[:5], logits[1:2])), tree, MAX_LEN)
    expected = plain[: plain.index(V - 1) + 1] if V - 1 in plain else plain
    assert list(result.token_ids) == expected
    assert set(result.origins[:-1]) <= {TokenOrigin.ACCEPTED}


def test_no_rounds_have_no_results() -> None:
    assert decide_all([], torch.zeros(0, V), MAX_LEN) == []
