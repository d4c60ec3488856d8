"""KV blocks: full pages of a KV cache as bytes, which can be stored outside of the process and restored in any process.

A page's digest covers everything that determines its bits (see `pages`), so that equal digests mean equal blocks. A
block has the keys and values of its positions, and their features if they are stored.
"""

import torch
from torch import Tensor

from outrider.lm.features import FeatureStore
from outrider.lm.kv_storage import KVStorage
from outrider.lm.pages import PagePool


class KVBlocks:
    """The pages of a model as blocks. Not thread-safe: only the thread that owns the pool may call it.

    Args:
        storage: memory of keys and values.
        pool: pages of the storage.
        features: features of the same pages.
    """

    def __init__(self, storage: KVStorage, pool: PagePool, features: FeatureStore) -> None:
        self._storage = storage
        self._pool = pool
        self._features = features
        self._is_tracking = False

    @property
    def layout(self) -> str:
        """Description of shapes, dtypes and features; blocks are compatible only if it is equal."""
        layers = ",".join(map(str, self._features.layers)) or "none"
        return f"{self._storage.layout} features {layers} of {self._features.hidden_size}"

    @property
    def block_len(self) -> int:
        """Positions per block."""
        return self._pool.page_len

    @property
    def block_bytes(self) -> int:
        """Size of a block, in bytes."""
        return self._pool.page_bytes + self._features.page_bytes

    def take_fresh(self) -> list[tuple[bytes, Tensor]]:
        """Return digest and content of each page filled since the last call; none at the first call.

        Returns:
            Contents as uint8 [block_bytes], on the CPU.
        """
        if not self._is_tracking:
            self._is_tracking = True
            self._pool.track()
        return [(digest, self._content(page)) for page, digest in self._pool.take_fresh()]

    def put(self, digest: bytes, content: Tensor) -> bool:
        """Restore a page to the prefix cache.

        Args:
            digest: digest of the page.
            content: from `take_fresh`, of this or another process: uint8 [block_bytes], on the CPU.

        Returns:
            Whether the page is in the prefix cache now; False if sessions hold all pages.

        Raises:
            ValueError: the content is not `block_bytes` long.
        """
        if content.numel() != self.block_bytes:
            raise ValueError(f"the block has {content.numel()} bytes, must have {self.block_bytes}")
        if self._pool.is_published(digest):
            return True
        page = self._pool.fill(digest)
        if page is None:
            return False
        self._storage.write_page(page, content[: self._pool.page_bytes])
        self._features.write_page(page, content[self._pool.page_bytes :])
        return True

    def _content(self, page: int) -> Tensor:
        return torch.cat([self._storage.read_page(page).cpu(), self._features.read_page(page).cpu()])
