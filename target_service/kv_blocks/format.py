"""The format of a block of KV cache in Redis: a header, then the block's bytes.

The header has a version, a digest of everything that gives the bytes their meaning (model, numerics, shapes, dtypes),
the block's own digest, and a seal over all of it and the bytes: HMAC-SHA-256 under the secret that the fleet's targets
share, so that only they can make a block that they accept. Under an empty secret the seal detects accidents only, and
all writers to that Redis are trusted. A block in which anything differs is refused, and computed instead.
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
    """A block is not the one that its key names; the message names the difference."""


def layout_digest(layout: str) -> bytes:
    """Return the digest of a layout, which must agree between writer and reader."""
    return hashlib.sha256(layout.encode()).digest()


def header(digest: bytes, layout: bytes, content: memoryview, secret: bytes) -> bytes:
    """Return the header of a block.

    Args:
        digest: the block's, 32 bytes.
        layout: as `layout_digest` returned it.
        content: the bytes.
        secret: shared by the targets of the fleet; may be empty.
    """
    label = _LABEL.pack(_MAGIC, _VERSION, content.nbytes, digest, layout)
    return label + _seal(label, content, secret)


def checked(data: bytes, digest: bytes, layout: bytes, secret: bytes) -> memoryview:
    """Return a block's bytes without their header.

    Args:
        data: header and bytes.
        digest: the block's.
        layout: as `layout_digest` returned it here.
        secret: as for `header`.

    Raises:
        BlockRefused: it is another block, of another model or version, sealed with another secret, or has changed.
    """
    if len(data) < HEADER_BYTES:
        raise BlockRefused(f"has {len(data)} bytes, which is less than a header")
    magic, version, num_bytes, found, found_layout = _LABEL.unpack_from(data)
    content = memoryview(data)[HEADER_BYTES:]
    if magic != _MAGIC or version != _VERSION:
        raise BlockRefused(f"version {version}, {_VERSION} is expected")
    if found != digest:
        raise BlockRefused("its key names another block")
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
