"""The encoding of protocol buffers by hand: numbers and texts as bytes.

A field is its tag, `number << 3 | wire type`, and its value. Wire type 0 is a number, 2 is a length and as many bytes.
"""

from __future__ import annotations

SMALL = 1 << 14
"""Numbers below this one have their bytes in `VARINTS`."""


def _encoded(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


VARINTS = [_encoded(value) for value in range(SMALL)]
"""The bytes of each small number."""

CONTINUED = [bytes((value & 0x7F | 0x80, value >> 7 | 0x80)) for value in range(SMALL)]
"""The bytes of the low 14 bits of a larger number; the bytes of its other bits follow."""


def varint(value: int) -> bytes:
    """Return the bytes of a number of 0 or more."""
    if value < SMALL:
        return VARINTS[value]
    return CONTINUED[value & SMALL - 1] + varint(value >> 14)


def text(tag: bytes, value: bytes) -> bytes:
    """Return a field of text or bytes. An empty value has no bytes, as in proto3."""
    return tag + varint(len(value)) + value if value else b""


def field_bytes(size: int) -> int:
    """Return the bytes of a field whose value has `size` bytes and whose number is below 16. An empty value takes none."""
    return 1 + (size.bit_length() + 6) // 7 + size if size else 0
