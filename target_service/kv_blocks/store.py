"""The KV blocks in Redis: one key each, written and read by any target; a block that is missing is computed."""

from collections.abc import Sequence
from typing import Any, Final, cast

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

_PREFIX: Final = b"outrider:kv:"
_MAX_CONNECTIONS: Final = 16
_EVICTING: Final = ("allkeys-", "volatile-")


class BlockStoreError(Exception):
    """A call of Redis failed or took longer than its bound; the message has the reason."""


class BlockStore:
    """Blocks by their digests. Threads may share it.

    Args:
        url: redis:// or rediss://.
        timeout_s: bound on connecting and on each part of an answer, in seconds.
        ttl_s: seconds until a block that is not used expires.
    """

    def __init__(self, url: str, *, timeout_s: float, ttl_s: float) -> None:
        self._redis = redis.Redis.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._ttl_ms = int(1000 * ttl_s)

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()

    def get(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the block of each digest, None where there is none, and renew the TTL of those that are there.

        Raises:
            BlockStoreError: there was no answer within the bound.
        """
        calls = self._redis.pipeline(transaction=False)
        for digest in digests:
            calls.getex(_key(digest), px=self._ttl_ms)
        return cast("list[bytes | None]", self._executed(calls))

    def put(self, blocks: Sequence[tuple[bytes, bytes, memoryview]]) -> int:
        """Write the blocks that are not there yet, and renew the TTL of the others; one message for each of the two.

        Args:
            blocks: digest, header and content of each.

        Returns:
            Blocks that were not there before.

        Raises:
            BlockStoreError: there was no answer within the bound, or no memory.
        """
        known = self._redis.pipeline(transaction=False)
        for digest, _, _ in blocks:
            known.pexpire(_key(digest), self._ttl_ms)
        new = [block for block, is_known in zip(blocks, self._executed(known), strict=True) if not is_known]
        writes = self._redis.pipeline(transaction=False)
        for digest, header, content in new:
            writes.set(_key(digest), b"".join((header, content)), px=self._ttl_ms)
        if new:
            self._executed(writes)
        return len(new)

    def delete(self, digests: Sequence[bytes]) -> None:
        """Delete blocks that were refused; raise `BlockStoreError` where that fails."""
        calls = self._redis.pipeline(transaction=False)
        for digest in digests:
            calls.unlink(_key(digest))
        self._executed(calls)

    def is_bounded(self) -> bool:
        """Return whether the server has a memory limit at which it evicts; true where it does not report any.

        Raises:
            BlockStoreError: there was no answer within the bound.
        """
        try:
            info = self._redis.info("memory")
        except exceptions.ResponseError:
            return True
        except (exceptions.RedisError, OSError) as error:
            raise BlockStoreError(str(error)) from error
        return bool(info.get("maxmemory")) and str(info.get("maxmemory_policy")).startswith(_EVICTING)

    def _executed(self, calls: Any) -> list[Any]:
        try:
            return cast("list[Any]", calls.execute())
        except (exceptions.RedisError, OSError) as error:
            raise BlockStoreError(str(error)) from error


def _key(digest: bytes) -> bytes:
    return _PREFIX + digest.hex().encode()
