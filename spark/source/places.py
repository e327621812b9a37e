"""Positions of places in the log: of a time, or at the boundary of a record."""

from __future__ import annotations

import numpy as np

from penstock.spark import segments
from penstock.spark.records import Records
from penstock.spark.segments import LogSegment
from penstock.spark.source.options import Place


def position_of(place: Place, listed: list[LogSegment]) -> int:
    """Return the position of the first record at a place or after it, among the segments of a log.

    It is the beginning of the log for an earlier place, and its end for a later one. Store times never decrease along the log.
    """
    if place.at_ms is not None:
        return _of_time(place.at_ms, listed)
    for segment in listed:
        if place.position < segment.stop:
            return _boundary(place.position, segment)
    return listed[-1].stop


def _of_time(at_ms: int, listed: list[LogSegment]) -> int:
    """Return the position of the first record that was stored at a time or after it."""
    begun = [segment for segment in listed if (first_ms := segments.first_ms(segment)) is not None and first_ms < at_ms]
    if not begun:
        return listed[0].base
    last = begun[-1]
    for block in segments.blocks(last.path, last.base, last.base, last.stop):
        is_later = Records.of(block).header["store_ms"] >= at_ms
        if is_later.any():
            return int(block.position + block.offsets[np.argmax(is_later)])
    return last.stop


def _boundary(position: int, segment: LogSegment) -> int:
    """Return the position of the first record of a segment from `position` on, or its end."""
    if position <= segment.base:
        return segment.base
    for block in segments.blocks(segment.path, segment.base, segment.base, segment.stop):
        positions = block.position + block.offsets
        at = int(np.searchsorted(positions, position))
        if at < len(positions):
            return int(positions[at])
    return segment.stop
