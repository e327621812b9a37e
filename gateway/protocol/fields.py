"""The data types of the fields in MQTT packets (MQTT 5.0, 1.5).

Each reader gets the body of a packet, the offset of the field, and the name of the field for an error. It returns the value
and the offset after the field, or raises `MalformedPacket`. Of two clauses for one rule the first is of MQTT 5.0, the second of
MQTT 3.1.1.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from penstock.gateway.protocol.errors import MalformedPacket

REMAINING_BYTES_MAX: Final = 268_435_455
"""The greatest variable byte integer, and so the most bytes after a fixed header (MQTT 5.0, 1.5.5; MQTT 3.1.1, 2.2.3)."""

U16: Final = Struct(">H")
U32: Final = Struct(">I")


def read_byte(body: bytes, at: int, what: str) -> tuple[int, int]:
    if at >= len(body):
        raise MalformedPacket(f"The packet ends before its {what}.")
    return body[at], at + 1


def read_u16(body: bytes, at: int, what: str) -> tuple[int, int]:
    if at + 2 > len(body):
        raise MalformedPacket(f"The packet ends within its {what}.")
    return body[at] << 8 | body[at + 1], at + 2


def read_u32(body: bytes, at: int, what: str) -> tuple[int, int]:
    if at + 4 > len(body):
        raise MalformedPacket(f"The packet ends within its {what}.")
    return U32.unpack_from(body, at)[0], at + 4


def read_varint(body: bytes, at: int, what: str) -> tuple[int, int]:
    """Read a variable byte integer, which must have as few bytes as possible [MQTT-1.5.5-1]."""
    value = 0
    for shift in (0, 7, 14, 21):
        if at >= len(body):
            raise MalformedPacket(f"The packet ends within its {what}.")
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if not byte and shift:
                raise MalformedPacket(f"The {what} {value} has more bytes than it needs [MQTT-1.5.5-1].")
            return value, at
    raise MalformedPacket(f"The {what} continues after its fourth byte (1.5.5).")


def read_binary(body: bytes, at: int, what: str) -> tuple[bytes, int]:
    length, at = read_u16(body, at, what)
    stop = at + length
    if stop > len(body):
        raise MalformedPacket(f"The packet ends within its {what}, which announces {length} bytes; {len(body) - at} are left.")
    return body[at:stop], stop


def read_string(body: bytes, at: int, what: str) -> tuple[str, int]:
    raw, at = read_binary(body, at, what)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise MalformedPacket(f"The {what} is not UTF-8 from byte {error.start} on [MQTT-1.5.4-1], [MQTT-1.5.3-1].") from error
    if "\0" in text:
        raise MalformedPacket(f"The {what} contains U+0000 [MQTT-1.5.4-2], [MQTT-1.5.3-2].")
    return text, at


def read_pair(body: bytes, at: int, what: str) -> tuple[tuple[str, str], int]:
    name, at = read_string(body, at, f"name of a {what}")
    value, at = read_string(body, at, f"value of a {what}")
    return (name, value), at


def write_varint(value: int) -> bytes:
    """Return a variable byte integer of one to four bytes. `value` is at most `REMAINING_BYTES_MAX`."""
    assert 0 <= value <= REMAINING_BYTES_MAX, value
    if value < 128:
        return bytes((value,))
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def write_binary(value: bytes) -> bytes:
    return U16.pack(len(value)) + value


def write_string(value: str) -> bytes:
    return write_binary(value.encode())


def write_pair(value: tuple[str, str]) -> bytes:
    return write_string(value[0]) + write_string(value[1])
