"""How a block of KV cache is written in Redis: a header that says what it is, then its bytes.

The header has a version, what must agree for the bytes to mean the same (model, numerics, shapes, dtypes: as a digest),
the block's own digest, and a seal over all of it and the bytes: HMAC-SHA-256 under the secret that the fleet's targets
share, so that nobody else can make a block that they take. Under an empty secret it finds accidents only, and whoever
may write to that Redis is trusted. A block in which anything differs is refused, and computed instead.
"""

import hashlib
import hmac
import struct
from typing import Final

_MAGIC: Final = b"OKVB"
_VERSION: Final = 2
_LABEL: Final = struct.Struct("<4sHxxQ32s32s")
_SEAL_BYTES: Final = 32
HEADER_BYTES: Final = _LABEL.size + _SEAL_BYTES


class BlockRefused(Exception):
    """A block is not what it is kept as; the message says in what it differs."""


def layout_digest(layout: str) -> bytes:
    """Returns the digest of what must agree."""
    return hashlib.sha256(layout.encode()).digest()


def header(digest: bytes, layout: bytes, content: memoryview, secret: bytes) -> bytes:
    """Returns what stands before a block's bytes.

    Args:
        digest: the block's, 32 bytes.
        layout: what `layout_digest` returned.
        content: the bytes.
        secret: what the targets of the fleet share; may be empty.
    """
    label = _LABEL.pack(_MAGIC, _VERSION, content.nbytes, digest, layout)
    return label + _seal(label, content, secret)


def checked(data: bytes, digest: bytes, layout: bytes, secret: bytes) -> memoryview:
    """Returns a block's bytes without their header.

    Args:
        data: header and bytes.
        digest: the block's.
        layout: what `layout_digest` returned here.
        secret: as for `header`.

    Raises:
        BlockRefused: it is another block, of another model or version, sealed with another secret, or has changed.
    """
    if len(data) < HEADER_BYTES:
        raise BlockRefused(f"{len(data)} bytes are no block")
    magic, version, num_bytes, found, found_layout = _LABEL.unpack_from(data)
    content = memoryview(data)[HEADER_BYTES:]
    if magic != _MAGIC or version != _VERSION:
        raise BlockRefused(f"version {version}, {_VERSION} is expected")
    if found != digest:
        raise BlockRefused("another block stands in its place")
    if found_layout != layout:
        raise BlockRefused("written for another model, numerics or layout")
    label, seal = data[: _LABEL.size], data[_LABEL.size : HEADER_BYTES]
    if num_bytes != len(content) or not hmac.compare_digest(_seal(label, content, secret), seal):
        raise BlockRefused("its bytes have changed, or it was sealed with another secret")
    return content


def _seal(label: bytes, content: memoryview, secret: bytes) -> bytes:
    seal = hmac.new(secret, label, hashlib.sha256)
    seal.update(content)
    return seal.digest()
