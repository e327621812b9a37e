"""Packs many records that differ only in their bodies, a few dozen with one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct

from penstock.store.record import SIZE_AND_CRC, checksum

PACKED_MAX = 64
"""Maximum number of records that one call packs."""


def alike_records(size: int, beginning: bytes, bodies: Sequence[bytes]) -> list[bytes]:
    """Return records of `size` bytes that differ only in their bodies, in order, as a few pieces of bytes.

    Args:
        size: of each record, header included.
        beginning: what each record has between its checksum and its body.
        bodies: all of one length.
    """
    crc, shape = checksum(beginning), (len(beginning), len(bodies[0]))
    pieces = []
    for at in range(0, len(bodies), PACKED_MAX):
        some = bodies[at : at + PACKED_MAX]
        fields = [size, 0, beginning, b""] * len(some)
        fields[1::4] = map(checksum, some, repeat(crc))
        fields[3::4] = some
        pieces.append(_packer(len(some), shape).pack(*fields))
    return pieces


@lru_cache(maxsize=256)
def _packer(count: int, shape: tuple[int, int]) -> Struct:
    """Return what packs `count` records, each given by its size, its checksum, and two pieces of the lengths in `shape`."""
    return Struct("<" + f"{SIZE_AND_CRC.format.removeprefix('<')}{shape[0]}s{shape[1]}s" * count)
