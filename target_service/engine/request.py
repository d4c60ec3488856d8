"""A request of the engine: what its rows, its draws and its features need beside `OpenRequest`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.lm.model import KVCache
from outrider.parameters import AcceptanceRule
from outrider.speculation.randomness import KeyedSource
from target_service.engine.open_request import OpenRequest
from target_service.engine.request_constraint import RequestConstraint


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
        constraint: on its output; None without one.
    """

    rule: AcceptanceRule
    source: KeyedSource
    feature_layers: tuple[int, ...] = ()
    features_len: int = 0
    is_restoring: bool = False
    prediction: Sequence[int] = ()
    constraint: RequestConstraint | None = None

    @property
    def output(self) -> Sequence[int]:
        """Tokens of this request's output so far."""
        return self.resident.token_ids[self.prompt_len :]

    def forced(self, most: int) -> Sequence[int]:
        """Return the tokens, at most so many, that a round proposes because the constraint forces them."""
        if self.constraint is None or not self.speculation.terms.forced_tokens:
            return ()
        return self.constraint.forced_line(min(most, self.room - 1))

    def begin_round(self, now: float) -> None:
        """Begin a round, as all requests do; the constraint follows the output first.

        Raises:
            OutriderError: see `RequestConstraint.follow`.
        """
        try:
            if self.constraint is not None and self.has_start and not self.finished:
                self.constraint.follow()
                terms = self.speculation.terms
                if not self.constraint.takes_proposals:
                    self.speculation.change(replace(terms, num_speculative_tokens=0, forced_tokens=False))
                self.speculation.num_forced = len(self.constraint.forced) if self.speculation.terms.forced_tokens else 0
        finally:
            OpenRequest.begin_round(self, now)

    @property
    def num_uncached(self) -> int:
        """Tokens still to be run."""
        return len(self.resident.token_ids) - self.resident.cache.cached_len

    @property
    def can_run(self) -> bool:
        """Whether there are tokens to run, and room in the window for the output."""
        length = len(self.resident.token_ids)
        is_wanted = self.has_start and length < self.window_end and self.num_uncached > 0
        is_held = self.is_restoring or (self.constraint is not None and not self.constraint.has_followed)
        return is_wanted and not self.finished and not is_held
