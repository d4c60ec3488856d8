"""Model drafters over Markov models of known distribution, with every pass on record."""

from collections.abc import Sequence

import torch

from outrider.drafters.choices import TreeOptions
from outrider.drafters.model import ModelDrafter, ModelDrafterOptions
from outrider.drafters.node_values import NodeValues
from outrider.lm.markov import MarkovModel
from outrider.lm.model import KVCache, LanguageModel, ModelInfo, SessionStep

MARKOV = "markov:vocabulary=24,order=2,seed=3,scale=2.0"


class RecordedModel:
    """A `LanguageModel` that notes the rows of each session in each pass, and breaks at one token where told to."""

    def __init__(self, model: LanguageModel, poison: int | None = None) -> None:
        self._model = model
        self._poison = poison
        self.passes: list[list[int]] = []

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    def new_cache(self, salt: bytes = b"") -> KVCache:
        return self._model.new_cache(salt)

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        self.passes.append([step.num_rows for step in steps])
        if any(self._poison in step.span.token_ids for step in steps):
            raise RuntimeError("out of memory")
        return self._model.forward(steps)


class ByLikelihood(NodeValues):
    """Values of nodes that are their likelihoods."""

    def ranks(self, depth: int) -> list[float]:
        return [1.0] * 8

    def value(self, depth: int, rank: int, likelihood: float) -> float:
        return likelihood


def markov(name: str = MARKOV) -> MarkovModel:
    """Returns a model of known distribution."""
    return MarkovModel.from_name(name)


def options(
    *, kv_budget_bytes: int = 1 << 20, chunk: int = 64, top_k: int = 24, p_min: float = 0.0
) -> ModelDrafterOptions:
    """Returns options for tests."""
    return ModelDrafterOptions(
        kv_budget_bytes=kv_budget_bytes,
        prefill_chunk_len=chunk,
        max_session_len=4096,
        tree=TreeOptions(top_k=top_k, p_min=p_min),
    )


def model_drafter(model: LanguageModel | None = None, **changes: float) -> ModelDrafter:
    """Returns a drafter over a Markov model, or over `model`."""
    return ModelDrafter(model or markov(), options(**changes))  # type: ignore[arg-type]
