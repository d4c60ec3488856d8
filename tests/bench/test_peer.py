"""The transformers process."""

import pytest

from bench.models import transformers_name
from bench.peer import TransformersPeer
from outrider.errors import OutriderError


async def test_a_failure_is_told_and_the_next_request_answered() -> None:
    async with TransformersPeer(transformers_name("shape:tiny")) as peer:
        assert peer.weight_bytes == pytest.approx(213632, rel=0.01)
        with pytest.raises(OutriderError, match="transformers: IndexError"):
            await peer.generate((100_000,), 2)
        assert await peer.generate((5, 6), 3) > 0


async def test_a_model_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OutriderError, match="ended"):
        await TransformersPeer("/nonexistent/model").__aenter__()
