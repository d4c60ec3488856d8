"""How a block of KV cache is written in Redis: a header that says what it is, then its bytes.

The header has a version, what must agree for the bytes to mean the same (model, numerics, shapes, dtypes: as a digest),
the block's own digest, and a checksum. A block in which anything differs is refused, and computed instead.
"""

import hashlib
import struct
from typing import Final

_MAGIC: Final = b"OKVB"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sHxxQ32s32s32s")
HEADER_BYTES: Final = _HEADER.size


class BlockRefused(Exception):
    """A block is not what it is kept as; the message says in what it differs."""


def layout_digest(layout: str) -> bytes:
    """Returns the digest of what must agree."""
    return hashlib.sha256(layout.encode()).digest()


def header(digest: bytes, layout: bytes, content: memoryview) -> bytes:
    """Returns what stands before a block's bytes.

    Args:
        digest: the block's, 32 bytes.
        layout: what `layout_digest` returned.
        content: the bytes.
    """
    checksum = hashlib.sha256(content).digest()
    return _HEADER.pack(_MAGIC, _VERSION, content.nbytes, digest, layout, checksum)


def checked(data: bytes, digest: bytes, layout: bytes) -> memoryview:
    """Returns a block's bytes without their header.

    Args:
        data: header and bytes.
        digest: the block's.
        layout: what `layout_digest` returned here.

    Raises:
        BlockRefused: it is another block, of another model or version, or its bytes have changed.
    """
    if len(data) < HEADER_BYTES:
        raise BlockRefused(f"{len(data)} bytes are no block")
    magic, version, num_bytes, found, found_layout, checksum = _HEADER.unpack_from(data)
    content = memoryview(data)[HEADER_BYTES:]
    if magic != _MAGIC or version != _VERSION:
        raise BlockRefused(f"version {version}, {_VERSION} is expected")
    if found != digest:
        raise BlockRefused("another block stands in its place")
    if found_layout != layout:
        raise BlockRefused("written for another model, numerics or layout")
    if num_bytes != len(content) or hashlib.sha256(content).digest() != checksum:
        raise BlockRefused("its bytes have changed")
    return content
