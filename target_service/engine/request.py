"""A request of the engine: what its rows, its draws and its features need beside `OpenRequest`."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lm.model import KVCache
from outrider.parameters import AcceptanceRule
from outrider.speculation.randomness import KeyedSource
from target_service.engine.open_request import OpenRequest


@dataclass(slots=True, eq=False, kw_only=True)
class Request(OpenRequest[KVCache]):
    """A request that runs on a resident session, from `open` to `close`; see `OpenRequest`.

    Attributes:
        rule: judges its proposals.
        source: of its randomness.
        feature_layers: layers whose features the session's draft requested.
        features_len: positions from 0 on whose features were sent, or are not needed.
        is_restoring: whether blocks of its KV cache are being fetched.
        prediction: tokens that its output is expected to be, for a draft within this process.
    """

    rule: AcceptanceRule
    source: KeyedSource
    feature_layers: tuple[int, ...] = ()
    features_len: int = 0
    is_restoring: bool = False
    prediction: Sequence[int] = ()

    @property
    def num_uncached(self) -> int:
        """Tokens still to be run."""
        return len(self.resident.token_ids) - self.resident.cache.cached_len

    @property
    def can_run(self) -> bool:
        """Whether there are tokens to run, and room in the window for the output."""
        length = len(self.resident.token_ids)
        is_wanted = self.has_start and length < self.window_end and self.num_uncached > 0
        return is_wanted and not self.finished and not self.is_restoring
