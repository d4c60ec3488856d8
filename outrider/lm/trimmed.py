"""A draft model with an output layer over a part of its vocabulary; in small models the output layer is the largest."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import ModelUnsupported
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.model import ModelInfo, SessionStep
from outrider.lm.pages import KVUsage
from outrider.lm.transformer import TransformersModel


class TrimmedModel:
    """A `LanguageModel` with a trimmed output layer; tokens outside its vocabulary have logits of minus infinity.

    Args:
        model: model with logits over the trimmed vocabulary.
        vocabulary: the trimmed vocabulary.
    """

    def __init__(self, model: TransformersModel, vocabulary: DraftVocabulary) -> None:
        self._model = model
        self._token_ids = vocabulary.token_ids

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""
        return self._model.info

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of the KV cache."""
        return self._model.kv_usage

    @property
    def features(self) -> None:
        """None: draft models provide no features."""

    @property
    def blocks(self) -> None:
        """None: the KV cache of a draft is cheap to recompute."""

    def new_cache(self, salt: bytes = b"") -> PagedKVCache:
        """Return an empty KV cache; see `TransformersModel`."""
        return self._model.new_cache(salt)

    def forward(self, steps: Sequence[SessionStep]) -> list[Tensor]:
        """Run one pass; see `LanguageModel.forward`."""
        return [self._spread(logits) for logits in self._model.forward(steps)]

    def _spread(self, logits: Tensor) -> Tensor:
        size = (len(logits), self.info.vocabulary_size)
        spread = torch.full(size, -torch.inf, dtype=logits.dtype, device=logits.device)
        return spread.index_copy_(1, self._token_ids.to(logits.device), logits)


def trim_output_layer(model: PreTrainedModel, vocabulary: DraftVocabulary) -> None:
    """Replace the model's output layer by one with only the vocabulary's rows.

    Raises:
        ModelUnsupported: the vocabulary belongs to another model.
    """
    whole: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if len(whole.weight) != vocabulary.target_size:
        raise ModelUnsupported(
            f"the vocabulary map is of {vocabulary.target_size} tokens, the model has {len(whole.weight)}"
        )
    rows = whole.weight.detach()[vocabulary.token_ids.to(whole.weight.device)]
    trimmed = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device=rows.device, dtype=rows.dtype)
    trimmed.weight = nn.Parameter(rows.clone(), requires_grad=False)
    model.set_output_embeddings(trimmed)  # type: ignore[no-untyped-call]
