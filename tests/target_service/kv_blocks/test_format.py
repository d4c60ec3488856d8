import struct

import pytest

from target_service.kv_blocks.format import HEADER_BYTES, BlockRefused, checked, header, layout_digest

DIGEST, OTHER = b"d" * 32, b"o" * 32
LAYOUT = layout_digest("a model and its numerics")
SECRET = b"what all targets share"
CONTENT = bytes(range(256)) * 8


def block() -> bytes:
    return header(DIGEST, LAYOUT, memoryview(CONTENT), SECRET) + CONTENT


def test_what_was_written_is_read() -> None:
    assert bytes(checked(block(), DIGEST, LAYOUT, SECRET)) == CONTENT
    assert HEADER_BYTES == 112


@pytest.mark.parametrize("place", [0, 5, HEADER_BYTES, HEADER_BYTES + 700, HEADER_BYTES + len(CONTENT) - 1])
def test_a_flipped_bit_is_noticed(place: int) -> None:
    data = bytearray(block())
    data[place] ^= 4
    with pytest.raises(BlockRefused):
        checked(bytes(data), DIGEST, LAYOUT, SECRET)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "less than a header"),
        (block()[:HEADER_BYTES], "bytes have changed"),
        (block()[:-1], "bytes have changed"),
        (block() + b"x", "bytes have changed"),
        (block()[:4] + struct.pack("<H", 1) + block()[6:], "version 1"),
        (header(OTHER, LAYOUT, memoryview(CONTENT), SECRET) + CONTENT, "another block"),
        (header(DIGEST, layout_digest("float16"), memoryview(CONTENT), SECRET) + CONTENT, "another model"),
    ],
)
def test_whatever_differs_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BlockRefused, match=reason):
        checked(data, DIGEST, LAYOUT, SECRET)


@pytest.mark.parametrize("secret", [b"", b"another"])
def test_a_block_of_another_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(BlockRefused, match="another secret"):
        checked(block(), DIGEST, LAYOUT, secret)


def test_a_seal_is_of_one_block() -> None:
    """A block cannot be passed off as another one: what stands before the bytes is sealed with them."""
    data = block().replace(DIGEST, OTHER)
    with pytest.raises(BlockRefused, match="another secret"):
        checked(data, OTHER, LAYOUT, SECRET)
