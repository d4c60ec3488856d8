"""Acceptance along a text, and the conditional noise of a text."""

import pytest
import torch

from outrider.training.acceptance import Acceptance, coupled_matches, greedy_matches, walk


def _right(*rows: str) -> torch.Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def test_a_walk_goes_on_behind_what_was_accepted_and_the_targets_own_token() -> None:
    # The answer begins at 2; its first token is the target's. Known: 2 -> column 1.
    found = walk(_right(".x..x...", ".x......"), start=2, end=8)
    # Column 1: both right, known 2 + 3 = 5. Column 4: one right, known 7, the end.
    assert found == Acceptance(2, (2, 2), (2, 1))
    assert found.mean_acceptance_length == 2.5
    assert found.rates == (1.0, 0.5)


def test_guesses_beyond_the_end_are_not_judged() -> None:
    found = walk(_right("xxxx", "xxxx", "xxxx"), start=1, end=3)
    assert found == Acceptance(1, (1, 0, 0), (1, 0, 0))
    assert walk(_right("xx"), start=1, end=2).num_rounds == 0


def test_without_a_right_guess_every_token_is_a_round() -> None:
    found = walk(_right("......", "......"), start=1, end=6)
    assert found == Acceptance(4, (4, 0), (0, 0)) and found.mean_acceptance_length == 1.0


def test_greedy_guesses_are_right_where_the_token_is_among_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 3)
    wanted = torch.tensor([1, 2, -1])
    assert greedy_matches(logits, wanted).tolist() == [True, False, False]
    assert greedy_matches(logits, wanted, width=2).tolist() == [True, True, False]


@pytest.mark.parametrize("width", [1, 2])
def test_noise_is_drawn_as_it_may_have_been(width: int) -> None:
    """Over many texts, predictions are correct as often as with a target that draws with the same noise."""
    num = 60_000
    torch.manual_seed(0)
    target, draft = torch.randn(2, 6)
    log_probs = target.log_softmax(-1)
    noise = -(-torch.rand(num, 6).clamp_(1e-12, 1 - 1e-7).log()).log()
    drawn = (log_probs + noise).argmax(-1)
    ranked = (draft.log_softmax(-1) + noise)[:, :5].topk(width, dim=-1).indices
    expected = (ranked == drawn[:, None]).any(-1).float().mean()
    # The last token is not in the draft vocabulary.
    wanted = torch.where(drawn < 5, drawn, -1)
    found = coupled_matches(
        draft[:5].expand(num, 5), log_probs[:5].expand(num, 5), wanted, torch.Generator().manual_seed(1), width
    )
    assert abs(found.float().mean() - expected) < 4 * (0.5 / num) ** 0.5


def test_a_draft_that_is_the_target_is_always_right() -> None:
    logits = torch.randn(500, 40) * 3
    log_probs = logits.log_softmax(-1)
    drawn = torch.distributions.Categorical(logits=logits).sample()
    assert coupled_matches(logits, log_probs, drawn, torch.Generator().manual_seed(0)).all()
