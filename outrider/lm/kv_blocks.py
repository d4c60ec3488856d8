"""KV blocks: full pages of a KV cache as bytes, to be kept outside of the process and put back, here or in another one.

A page's digest stands for everything that decides its bits (see `pages`), so whoever has the digest may use the block.
With the keys and values come the features that are kept beside them: a draft that needs them has them at once.
"""

import torch
from torch import Tensor

from outrider.lm.features import FeatureStore
from outrider.lm.kv_storage import KVStorage
from outrider.lm.pages import PagePool


class KVBlocks:
    """The pages of a model as blocks; the thread that owns the pool calls all methods.

    Args:
        storage: keys and values.
        pool: its pages.
        features: what is kept beside them.
    """

    def __init__(self, storage: KVStorage, pool: PagePool, features: FeatureStore) -> None:
        self._storage = storage
        self._pool = pool
        self._features = features
        self._is_tracking = False

    @property
    def layout(self) -> str:
        """Names everything that must agree for a block's bytes to mean the same."""
        layers = ",".join(map(str, self._features.layers)) or "none"
        return f"{self._storage.layout} features {layers} of {self._features.hidden_size}"

    @property
    def block_len(self) -> int:
        """Positions of a block."""
        return self._pool.page_len

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return self._pool.page_bytes + self._features.page_bytes

    def take_fresh(self) -> list[tuple[bytes, Tensor]]:
        """Returns digest and content of each page that has become full since the last call; none in the first one.

        Returns:
            Contents as uint8 [block_bytes], on the CPU.
        """
        if not self._is_tracking:
            self._is_tracking = True
            self._pool.track()
        return [(digest, self._content(page)) for page, digest in self._pool.take_fresh()]

    def put(self, digest: bytes, index: int, content: Tensor) -> bool:
        """Makes a page findable again.

        Args:
            digest: of the page.
            index: its place in its sessions: it begins at position index * block_len.
            content: what `take_fresh` returned.

        Returns:
            Whether it can be found now; False where no memory is left that nobody holds.

        Raises:
            ValueError: the content has another size.
        """
        if content.numel() != self.block_bytes:
            raise ValueError(f"a block of {content.numel()} bytes, {self.block_bytes} are expected")
        if self._pool.is_published(digest):
            return True
        page = self._pool.fill(digest)
        if page is None:
            return False
        self._storage.write_page(page, index, content[: self._pool.page_bytes])
        self._features.write_page(page, content[self._pool.page_bytes :])
        return True

    def _content(self, page: int) -> Tensor:
        return torch.cat([self._storage.read_page(page).cpu(), self._features.read_page(page).cpu()])
