"""Sending features of the target to drafts that predict from them."""

from typing import Final

import torch

from outrider.errors import ModelUnsupported
from outrider.lm.model import LanguageModel
from outrider.tokens import FeatureSpan
from target_service.engine.counters import EngineLoad
from target_service.engine.request import Request
from target_service.engine.results import Features

_MAX_FEATURE_BYTES: Final = 64 << 10
"""Of a frame, so that other sessions' frames go between the parts of a long prompt."""


class FeatureSender:
    """Sends the features that drafts request. All methods are called in the engine's thread.

    Args:
        model: computes and keeps features.
        load: counts the bytes that are sent.
        max_len: longest session, in tokens; features leave room for it.
    """

    def __init__(self, model: LanguageModel, load: EngineLoad, max_len: int) -> None:
        self._source = model.features
        self._position_bytes = 2 * model.info.hidden_size
        self._load = load
        self._max_len = max_len

    def keep(self, layers: tuple[int, ...]) -> None:
        """Have passes keep the features of these layers; raise `ModelUnsupported` where there are none, or no room."""
        if self._source is None:
            raise ModelUnsupported("the target has no features")
        self._source.keep(layers, self._max_len)

    def send(self, request: Request) -> None:
        """Send the features that a session's draft has not got yet, in parts, as far as its stream has room.

        While rounds use no proposals they are held back: each frame costs all three services a little.
        """
        source, layers, cache = self._source, request.feature_layers, request.resident.cache
        if source is None or not layers:
            return
        if request.speculation.does_without:
            return
        most = max(1, _MAX_FEATURE_BYTES // (self._position_bytes * len(layers)))
        while request.features_len < cache.cached_len and request.handle.stream.has_room_for_features:
            end = min(cache.cached_len, request.features_len + most)
            rows = source.read(cache, layers, request.features_len, end)
            data = rows.cpu().view(torch.uint8).numpy().tobytes()
            features = FeatureSpan(request.features_len, data)
            request.handle.stream.hold(Features(request.handle.number, features))
            request.features_len = end
            self._load.feature_bytes += len(data)
