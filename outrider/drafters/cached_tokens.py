"""A session's KV cache at a draft, and the tokens in it."""

from array import array
from collections.abc import Sequence

from outrider.lm.model import KVCache


class CachedTokens:
    """A KV cache, and the tokens in it: a session's, and after them drafted ones that may yet be accepted."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self._token_ids = array("I")
        self._agreed_len = 0

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.kv_cache.num_bytes

    def release(self) -> None:
        """Free the KV cache's memory."""
        self.kv_cache.release()

    def recheck_from(self, length: int) -> None:
        """Have the tokens from position `length` on compared again with the session's."""
        self._agreed_len = min(self._agreed_len, length)

    @property
    def cached_len(self) -> int:
        """Tokens cached."""
        return len(self._token_ids)

    def fork(self, length: int) -> "CachedTokens":
        """Return another cache of the first `length` tokens, in memory that both share."""
        other = CachedTokens(self.kv_cache.fork(length))
        other._token_ids = self._token_ids[:length]
        other._agreed_len = min(self._agreed_len, length)
        return other

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        del self._token_ids[length:]
        self._agreed_len = min(self._agreed_len, length)
        self.kv_cache.truncate(length)

    def missing(self, token_ids: Sequence[int]) -> range:
        """Keep the longest prefix that agrees with the session's tokens, and drop the rest.

        Returns:
            The positions still to be run, at least one.
        """
        end = len(token_ids)
        known_len = min(len(self._token_ids), end - 1)
        while self._agreed_len < known_len and self._token_ids[self._agreed_len] == token_ids[self._agreed_len]:
            self._agreed_len += 1
        self._agreed_len = min(self._agreed_len, known_len)
        if self._agreed_len < len(self._token_ids):
            del self._token_ids[self._agreed_len :]
            self.kv_cache.truncate(self._agreed_len)
        if self._agreed_len < end - 1 and self.kv_cache.adopt(token_ids):
            # Another session with the same prefix has run it.
            self._token_ids = array("I", token_ids[: self.kv_cache.cached_len])
            self._agreed_len = len(self._token_ids)
        return range(self._agreed_len, end)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens that a pass has cached."""
        self._token_ids.extend(token_ids)
        self._agreed_len = len(self._token_ids)
