"""A pass of the engine's own, which distinguishes a request that fails from a device that fails."""

import secrets
from typing import Final

import torch

from outrider.lm.model import LanguageModel, SessionStep
from outrider.serving.session_failures import EngineFailed
from outrider.tokens import TokenSpan

_TOKEN_ID: Final = 0


def probe(model: LanguageModel) -> None:
    """Run one token in a KV cache of its own; the device has finished when this returns.

    Raises:
        EngineFailed: the pass failed, or its logits have NaN.
    """
    cache = model.new_cache(secrets.token_bytes(16))
    try:
        logits = model.forward([SessionStep(cache, TokenSpan(0, (_TOKEN_ID,)))])[0]
        is_broken = bool(torch.isnan(logits).any())
        cache.truncate(0)
    except Exception as error:
        raise EngineFailed("a pass over one token failed") from error
    if is_broken:
        raise EngineFailed("a pass over one token gave NaN")
