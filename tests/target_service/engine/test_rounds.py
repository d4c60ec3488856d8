"""Rounds judged together: each session's result is what it is alone, under either rule."""

import random
from typing import Any

import pytest
import torch

from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, TokenOrigin
from target_service.engine.request import Request
from target_service.engine.rounds import Round, decide_all
from tests.exactness.judged import MAX_LEN, judge, request_of

V = 12

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "logprobs": 0},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 5},
    {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 8},
    {"top_p": 0.6, "max_tokens": 7},
]


def random_request(draw: random.Random) -> Request:
    parameters = SamplingParameters(**draw.choice(PARAMETERS), seed=draw.getrandbits(64))
    rule = draw.choice(list(REPLAYABLE_RULES))
    token_ids, window_end = [draw.randrange(V) for _ in range(10)], draw.choice([12, MAX_LEN])
    return request_of(token_ids, parameters, rule, prompt_len=5, stop_token_ids={V - 1}, window_end=window_end)


def tree_of(draw: random.Random) -> ProposalTree:
    tree = ProposalTree()
    for _ in range(draw.randrange(12)):
        parent, token_id = draw.randrange(len(tree) + 1), draw.randrange(V)
        if tree.child(parent, token_id) is None:
            drafter = draw.choice(["", "suffix", "model+suffix"])
            tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED, drafter=drafter))
    return tree


def rounds_of(draw: random.Random, num: int) -> list[Round]:
    rounds: list[Round] = []
    first_row = draw.randrange(3)  # rows of no session may stand anywhere
    for _ in range(num):
        rounds.append(Round(random_request(draw), first_row, tree_of(draw)))
        first_row += 1 + len(rounds[-1].tree) + draw.randrange(2)
    return rounds


@pytest.mark.parametrize("seed", range(40))
def test_rounds_judged_together_are_those_judged_alone(seed: int) -> None:
    draw = random.Random(seed)
    rounds = rounds_of(draw, draw.choice([1, 2, 5, 33]))
    logits = torch.randn(800, V, generator=torch.Generator().manual_seed(seed)) * 2
    results = decide_all(rounds, logits, MAX_LEN)
    assert results == [
        judge(item.request, logits[item.first_row : item.first_row + 1 + len(item.tree)], item.tree) for item in rounds
    ]
    for item, result in zip(rounds, results, strict=True):
        asks = item.request.parameters.logprobs is not None
        assert len(result.logprobs) == (len(result.token_ids) if asks else 0)
        assert len(result.token_ids) == len(result.origins) <= item.request.window_end - 10
        assert len(result.drafters) in (0, len(result.token_ids))
        for drafter, origin in zip(result.drafters, result.origins, strict=False):
            assert not drafter or origin is TokenOrigin.ACCEPTED


def test_accepted_tokens_name_the_drafters_that_proposed_them() -> None:
    request = request_of([1, 2, 3], SamplingParameters(temperature=0), AcceptanceRule.COUPLED, prompt_len=3)
    logits = torch.nn.functional.one_hot(torch.tensor([4, 5, 6, 7]), V).float()
    tree = ProposalTree()
    for parent, (token_id, drafter) in enumerate([(4, "model+suffix"), (5, "suffix")]):
        tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED, drafter=drafter))
    result = judge(request, logits[:3], tree)
    assert (result.token_ids, result.drafters) == ((4, 5, 6), ("model+suffix", "suffix", ""))
    # None where the draft has one drafter only, or none of it was accepted.
    assert judge(request, logits[:1], ProposalTree()).drafters == ()
    assert judge(request, logits[1:].repeat(2, 1)[:3], tree).drafters == ()


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_does_not_change_what_coupled_outputs(seed: int) -> None:
    """Logits depend on the depth alone, so that every branch meets the same."""
    draw = random.Random(seed)
    request, tree = random_request(draw), ProposalTree()
    request.rule, request.window_end = AcceptanceRule.COUPLED, MAX_LEN
    request.parameters = SamplingParameters(repetition_penalty=1.2)
    logits = torch.randn(30, V, generator=torch.Generator().manual_seed(seed))
    plain: list[int] = []
    for step in range(5):
        plain += judge(request, logits[step : step + 1], ProposalTree()).token_ids
        request.resident.token_ids.append(plain[-1])
    del request.resident.token_ids[10:]
    for parent, token_id in enumerate(plain[:4]):
        tree.append(ProposalNode(parent, token_id))
    if plain[0] != 0:
        tree.append(ProposalNode(ROOT, 0, NodeKind.GUESSED))
    result = judge(request, torch.cat((logits[:5], logits[1:2])), tree)
    expected = plain[: plain.index(V - 1) + 1] if V - 1 in plain else plain
    assert list(result.token_ids) == expected
    assert set(result.origins[:-1]) <= {TokenOrigin.ACCEPTED}


def test_no_rounds_have_no_results() -> None:
    assert decide_all([], torch.zeros(0, V), MAX_LEN) == []
