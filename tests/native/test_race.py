"""The tokens that can win a race: the winner is always among them, whatever logits, temperature and variant."""

import pytest
import torch

from outrider import native
from outrider.native import Variant
from outrider.parameters import SamplingParameters
from outrider.speculation.draws import Draw, target_draws
from outrider.speculation.randomness import Counter, Purpose, token_exponential
from outrider.speculation.sampling import SamplingMetadata, TokenHistory

BEST = native.best_variant()
pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")


@pytest.fixture(params=[item for item in Variant if BEST is not None and item <= BEST], ids=lambda item: item.name)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Variant:
    """The variant that draws use."""
    monkeypatch.setattr(native, "loaded_variant", lambda: request.param)
    return Variant(request.param)


def draws(num: int, seed: int, **parameters: float) -> list[Draw]:
    """Draws of rows 0, 1, ... at unlike positions and keys."""
    sampling = SamplingParameters(**parameters)  # type: ignore[arg-type]
    metadata = SamplingMetadata(sampling, TokenHistory((), (), sampling), ())
    return [Draw(row, metadata, (seed, 7 * row + 2**31), 100 * seed + row) for row in range(num)]


def compared(logits: torch.Tensor, chosen: list[Draw]) -> None:
    """Compares with a race of all tokens."""
    found = target_draws(logits, chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "loaded_variant", lambda: None)
        assert found == target_draws(logits, chosen)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 2.0, 50.0])
@pytest.mark.parametrize("size", [1, 2, 17, 512, 20001])
def test_the_winner_is_that_of_a_race_of_all(size: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(size)
    for seed, spread in enumerate((0.0, 0.5, 4.0, 60.0)):
        logits = spread * torch.randn(max(2, min(300, 100_000 // size)), size, generator=generator)
        compared(logits, draws(len(logits), seed, temperature=temperature))


@pytest.mark.usefixtures("variant")
def test_logits_that_are_far_apart_or_impossible() -> None:
    logits = torch.randn(200, 300)
    logits[:, ::3] = -torch.inf
    logits[50:100, 2:] = -torch.inf
    logits[100:150] *= 1e30
    logits[150:, 4] = 200.0
    compared(logits, draws(200, 1, temperature=1.0))
    compared(logits.bfloat16(), draws(200, 2, temperature=0.7))


@pytest.mark.usefixtures("variant")
def test_rows_that_need_more_than_a_race_are_drawn_beside_them() -> None:
    logits = torch.randn(5, 700)
    kinds = [{}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 5}, {"presence_penalty": 1.0}]
    mixed = [draws(5, 3, temperature=1.0, **kind)[row] for row, kind in enumerate(kinds)]
    compared(logits, mixed)


def test_few_tokens_are_left(variant: Variant) -> None:
    scores = 3 * torch.randn(64, 49152)
    counters = torch.randint(2**32, (64, 5))
    find = torch.ops.outrider.race_candidates.default
    found, tops = find(scores, torch.ones(64), counters, int(variant))
    assert torch.equal(tops, scores.amax(-1))
    assert found[0].unique().tolist() == list(range(64))
    assert found.shape[1] == 64
    assert torch.equal(found, find(scores, torch.ones(64), counters, int(Variant.AVX2))[0])
    rounded, _ = find(scores.bfloat16(), torch.ones(64), counters, int(variant))
    assert torch.equal(rounded, find(scores.bfloat16().float(), torch.ones(64), counters, int(variant))[0])


def test_tokens_that_nearly_tie_are_all_left_and_race(variant: Variant) -> None:
    chosen = draws(200, 5, temperature=0.7)
    logits = torch.full((200, 700), -40.0)
    for row, draw in enumerate(chosen):
        words, token_ids = Counter(Purpose.TARGET, draw.position).words, torch.tensor([3, 11, 650])
        noise = token_exponential(token_ids, words, draw.key)
        logits[row, token_ids] = (0.7 * noise.log()).float()
    compared(logits, chosen)
    counters = torch.tensor([(*Counter(Purpose.TARGET, draw.position).words, *draw.key) for draw in chosen])
    find = torch.ops.outrider.race_candidates.default
    (rows, token_ids), _ = find(logits, torch.full((200,), 1 / 0.7), counters, int(variant))
    assert rows.tolist() == [row for row in range(200) for _ in range(3)]
    assert token_ids.tolist() == [3, 11, 650] * 200
    assert len(set(target_draws(logits, chosen))) == 3


def test_a_row_whose_largest_score_is_not_finite_has_token_0_alone(variant: Variant) -> None:
    scores = torch.randn(4, 700)
    scores[1, 650], scores[2, :], scores[3, 3] = torch.nan, -torch.inf, torch.inf
    counters = torch.randint(2**32, (4, 5))
    (rows, token_ids), tops = torch.ops.outrider.race_candidates.default(scores, torch.ones(4), counters, int(variant))
    assert tops.isfinite().tolist() == [True, False, False, False]
    assert rows[rows > 0].tolist() == [1, 2, 3]
    assert token_ids[rows > 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 8).double()}, "float32"),
        ({"scores": torch.zeros(8)}, "rows"),
        ({"scores": torch.zeros(8, 2).T}, "contiguous"),
        ({"inverse_temperatures": torch.ones(3)}, "as many rows"),
        ({"counters": torch.zeros(2, 4, dtype=torch.int64)}, "as many rows"),
        ({"counters": torch.zeros(1, 5, dtype=torch.int64)}, "as many rows"),
        ({"variant": 7}, "variant 7"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, object], message: str) -> None:
    arguments = {
        "scores": torch.zeros(2, 8),
        "inverse_temperatures": torch.ones(2),
        "counters": torch.zeros(2, 5, dtype=torch.int64),
        "variant": 0,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.outrider.race_candidates.default(**arguments | change)
