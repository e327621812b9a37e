"""Reads stored messages in slices, so that a large one holds up nobody."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from penstock.store.errors import PositionUnknown
from penstock.store.options import KIB
from penstock.store.properties import Properties, decode_properties
from penstock.store.record import (
    COPY_BYTES,
    CRC_FROM,
    HEADER,
    HEADER_BYTES,
    KIND_AT,
    LENGTHS_AT,
    RECORD_BYTES_MAX,
    Kind,
    checksum,
    store_ms_of,
    topic_of,
)
from penstock.store.store import Store

BODY_BYTES_SHOWN: Final = 64 * KIB
"""Bytes of a body that one answer has. A longer body is cut."""

READ_BYTES: Final = 256 * KIB
"""Bytes of a record that are read and checked in one slice."""

HEAD_GUESS_BYTES: Final = 512
"""Bytes of a record that are read for its topic, which mostly is among them."""


@dataclass(frozen=True, slots=True)
class MessageRead:
    """A stored message, with the beginning of its body."""

    position: int
    size: int
    """Bytes of its record."""
    flags: int
    store_ms: int
    topic: str
    properties: Properties
    body: bytes
    """Up to `BODY_BYTES_SHOWN` bytes."""
    body_bytes: int
    """Bytes of the whole body."""


class MessageReader:
    """Reads messages by their positions.

    Parameters:
        store: has the messages.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, position: int) -> MessageRead | None:
        """Return the message at a position; None if there is none, it has expired, or its record is damaged.

        Callers may give any number. Therefore the whole record is checked, although a part of it is returned.
        """
        try:
            return await self._read(position)
        except PositionUnknown:
            return None

    async def _read(self, position: int) -> MessageRead | None:
        place = self._place(position)
        if place is None:
            return None
        read = self._store.log.read
        header = read(place, HEADER_BYTES)
        size, crc, kind, flags, topic_len, props_len, store_ms = HEADER.unpack(header)
        body_from = HEADER_BYTES + topic_len + props_len
        if kind != Kind.MESSAGE or not body_from <= size <= RECORD_BYTES_MAX:
            return None
        pieces, needed_bytes, computed_crc = [header], min(size, body_from + BODY_BYTES_SHOWN), checksum(header[CRC_FROM:])
        for begin in range(HEADER_BYTES, size, READ_BYTES):
            piece = read(place + begin, min(READ_BYTES, size - begin))
            computed_crc = checksum(piece, computed_crc)
            if begin < needed_bytes:
                pieces.append(piece)
            await asyncio.sleep(0)
        if computed_crc != crc:
            return None
        data = b"".join(pieces)
        return MessageRead(
            position,
            size,
            flags,
            store_ms,
            topic_of(data).decode(),
            decode_properties(data[body_from - props_len : body_from]),
            data[body_from:needed_bytes],
            size - body_from,
        )

    def _place(self, position: int) -> int | None:
        """Return where the log has the record of a position: there, or in a copy; None if it has none any more."""
        store = self._store
        if not 0 <= position < store.log.end:
            return None
        if position >= store.log.written:
            store.commit()
        if store.is_expired(position):
            return None
        if position >= store.log.start:
            return position
        copy = store.copies.where(position)
        return None if copy is None else copy + COPY_BYTES

    def head_at(self, position: int, size: int) -> tuple[str, int]:
        """Return the topic of a message, and when it was stored, given the size of its record; "" and 0 if it can't be read.

        The checksum is not verified, because that takes a read of the whole record.
        """
        if position >= self._store.log.written:
            self._store.commit()
        try:
            data = self._store.read(position, min(size, HEAD_GUESS_BYTES))
            end = HEADER_BYTES + int.from_bytes(data[LENGTHS_AT : LENGTHS_AT + 2], "little")
            if end > len(data):
                data = self._store.read(position, min(size, end))
        except PositionUnknown:
            return "", 0
        if data[KIND_AT] != Kind.MESSAGE:
            return "", 0
        return topic_of(data).decode(errors="replace"), store_ms_of(data)
