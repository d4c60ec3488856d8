"""A session's KV cache at a draft, and the tokens that it holds."""

from array import array
from collections.abc import Sequence

from outrider.drafters.drafter import OpenProposal
from outrider.lm.model import KVCache
from outrider.sampling import TokenHistory


class CachedTokens:
    """A KV cache, and which tokens it holds: a session's, and behind them drafted ones that may yet be accepted."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self._token_ids = array("I")
        self._agreed_len = 0
        self._history: tuple[OpenProposal, TokenHistory] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.kv_cache.num_bytes

    def release(self) -> None:
        """Gives the KV cache's memory back."""
        self.kv_cache.release()

    def disagree(self, length: int) -> None:
        """Learns that the session's tokens from position `length` on may be others than these."""
        self._agreed_len = min(self._agreed_len, length)

    @property
    def cached_len(self) -> int:
        """Tokens cached."""
        return len(self._token_ids)

    def fork(self, length: int) -> "CachedTokens":
        """Returns another cache that holds the first `length` tokens, in memory that both share."""
        other = CachedTokens(self.kv_cache.fork(length))
        other._token_ids = self._token_ids[:length]
        other._agreed_len = min(self._agreed_len, length)
        return other

    def truncate(self, length: int) -> None:
        """Drops the tokens from position `length` on."""
        del self._token_ids[length:]
        self._agreed_len = min(self._agreed_len, length)
        self.kv_cache.truncate(length)

    def missing(self, proposal: OpenProposal, end: int | None = None) -> range:
        """Keeps what is cached of the proposal, drops the rest.

        Args:
            proposal: whose tokens are to be cached.
            end: position before which they are wanted; None for all, drafted ones of a chain included.

        Returns:
            The positions still to be run, at least one.
        """
        end = proposal.len if end is None else end
        known_len = min(len(self._token_ids), end - 1)
        while self._agreed_len < known_len and self._token_ids[self._agreed_len] == proposal.token_id(self._agreed_len):
            self._agreed_len += 1
        self._agreed_len = min(self._agreed_len, known_len)
        if self._agreed_len < len(self._token_ids):
            del self._token_ids[self._agreed_len :]
            self.kv_cache.truncate(self._agreed_len)
        if self._agreed_len < len(proposal.token_ids) - 1 and self.kv_cache.adopt(proposal.token_ids):
            # Another session of the same beginning has run it.
            self._token_ids = array("I", proposal.token_ids[: self.kv_cache.cached_len])
            self._agreed_len = len(self._token_ids)
        return range(self._agreed_len, end)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Learns that a pass has cached these tokens too."""
        self._token_ids.extend(token_ids)
        self._agreed_len = len(self._token_ids)

    def history(self, proposal: OpenProposal) -> TokenHistory:
        """Returns the tokens of session and proposal, as penalties need them; the session's are gone through once."""
        if self._history is None or self._history[0] is not proposal:
            prompt_len = proposal.terms.prompt_len
            prompt, output = proposal.token_ids[:prompt_len], proposal.token_ids[prompt_len:]
            self._history = proposal, TokenHistory(prompt, output, proposal.terms.parameters)
        return self._history[1].extended([node.token_id for node in proposal.nodes])
