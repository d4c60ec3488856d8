"""A model that can say a part of its vocabulary only, which makes its output layer, a small model's largest, small."""

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
    """A `LanguageModel` over a model with a trimmed output layer: other tokens have logits of minus infinity.

    Args:
        model: its logits are those of the vocabulary's tokens.
        vocabulary: which these are.
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
        """How full the KV cache is."""
        return self._model.kv_usage

    @property
    def features(self) -> None:
        """None: a draft has no drafts."""

    @property
    def blocks(self) -> None:
        """None: a draft's cache is cheap to compute."""

    def new_cache(self, salt: bytes = b"") -> PagedKVCache:
        """Returns an empty KV cache; see `TransformersModel`."""
        return self._model.new_cache(salt)

    def forward(self, steps: Sequence[SessionStep]) -> list[Tensor]:
        """Runs one pass; see `LanguageModel.forward`."""
        return [self._spread(logits) for logits in self._model.forward(steps)]

    def _spread(self, logits: Tensor) -> Tensor:
        size = (len(logits), self.info.vocabulary_size)
        spread = torch.full(size, -torch.inf, dtype=logits.dtype, device=logits.device)
        return spread.index_copy_(1, self._token_ids.to(logits.device), logits)


def trim_output_layer(model: PreTrainedModel, vocabulary: DraftVocabulary) -> None:
    """Gives the model an output layer of the vocabulary's rows only.

    Raises:
        ModelUnsupported: the vocabulary is not of this model.
    """
    whole: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if len(whole.weight) != vocabulary.target_size:
        raise ModelUnsupported(
            f"the map beside the model is of {vocabulary.target_size} tokens, the model has {len(whole.weight)}"
        )
    rows = whole.weight.detach()[vocabulary.token_ids.to(whole.weight.device)]
    trimmed = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device=rows.device, dtype=rows.dtype)
    trimmed.weight = nn.Parameter(rows.clone(), requires_grad=False)
    model.set_output_embeddings(trimmed)  # type: ignore[no-untyped-call]
