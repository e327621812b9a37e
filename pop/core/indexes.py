"""The indexes of the deliveries of one checkpoint that are acknowledged together: usually all of them, and in order.

The indexes are kept as two rows of bytes, the low ones and the high ones. Handles and references have the same bytes as
columns, so whole columns are sliced and compared, and no integer is made for a single index. (numpy can do the same, but its
fixed costs exceed all the work on a batch of 32.)
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.store.bodies import REFERENCE

REFERENCE_BYTES = REFERENCE.size
_POSITION_BYTES = 8
assert REFERENCE.pack(0x0102030405060708, 0x0A0B) == bytes((8, 7, 6, 5, 4, 3, 2, 1, 0x0B, 0x0A, 0, 0))

_LOW = bytes(range(256)) * 256
_HIGH = b"".join(bytes((high,)) * 256 for high in range(256))


class Indexes(NamedTuple):
    """One or more indexes from 0 to 65,535: bits 0 to 7 of each, and bits 8 to 15 of each."""

    low: bytes
    high: bytes

    @classmethod
    def below(cls, count: int) -> Indexes:
        """Return 0 to `count` - 1."""
        return cls(_LOW[:count], _HIGH[:count])

    @property
    def number(self) -> int:
        """Number of indexes."""
        return len(self.low)

    def each(self) -> range | list[int]:
        """Return the indexes as integers; as a range if they are consecutive."""
        low, high = self
        first = low[0] | high[0] << 8
        stop = first + len(low)
        if low == _LOW[first:stop] and high == _HIGH[first:stop]:
            return range(first, stop)
        return [below | above << 8 for below, above in zip(low, high, strict=True)]

    def mask(self) -> int:
        """Return the indexes as a bit set. If an index occurs twice, the set has fewer bits than `number`."""
        found = self.each()
        if isinstance(found, range):
            return ((1 << len(found)) - 1) << found.start
        bits = bytearray((max(found) >> 3) + 1)
        for index in found:
            bits[index >> 3] |= 1 << (index & 7)
        return int.from_bytes(bits, "little")

    def references(self, checkpoint: int) -> bytes:
        """Return references to these deliveries of the checkpoint at a position, `REFERENCE` each."""
        body = bytearray(REFERENCE.pack(checkpoint, 0) * len(self.low))
        body[_POSITION_BYTES::REFERENCE_BYTES] = self.low
        body[_POSITION_BYTES + 1 :: REFERENCE_BYTES] = self.high
        return bytes(body)


def runs_of(references: bytes) -> list[tuple[int, Indexes]]:
    """Return position and indexes for each run of references to the same checkpoint."""
    runs = []
    at, end = 0, len(references)
    while at < end:
        position = references[at : at + _POSITION_BYTES]
        stop = at + REFERENCE_BYTES
        while references.startswith(position, stop):
            stop += REFERENCE_BYTES
        low = references[at + _POSITION_BYTES : stop : REFERENCE_BYTES]
        high = references[at + _POSITION_BYTES + 1 : stop : REFERENCE_BYTES]
        runs.append((int.from_bytes(position, "little"), Indexes(low, high)))
        at = stop
    return runs
