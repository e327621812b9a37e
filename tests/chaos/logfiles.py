"""Reads the files of a stopped node's log, as far as their sizes lead: which record is where, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.store import record
from penstock.store.errors import RecordCorrupt
from penstock.store.log.recordscan import walk
from penstock.store.record import COPY_FIXED, Kind
from tests.chaos.ledger import Key, key_of


class Found(NamedTuple):
    """A record of the log."""

    position: int
    size: int
    kind: int
    key: Key | None
    """Name of the publication, if the record is one."""


def segments(data_dir: Path) -> list[Path]:
    """Return the files of the log, oldest first."""
    return sorted((data_dir / "commitlog").glob("*.log"))


def records(data_dir: Path) -> Iterator[Found]:
    """Yield the records of the log."""
    for path in segments(data_dir):
        data = path.read_bytes()
        for offset in walk(data)[0]:
            try:
                found = record.decode(data, offset, position=int(path.stem) + offset)
            except RecordCorrupt:
                return
            body = found.body
            if found.kind == Kind.COPIED:
                inner = record.decode(body, 0, position=COPY_FIXED.unpack(found.fixed)[0])
                body = inner.body
            is_message = found.kind in (Kind.MESSAGE, Kind.COPIED)
            yield Found(found.position, found.size, found.kind, key_of(body) if is_message else None)


class Harm(NamedTuple):
    """What damaged ranges of the log hold."""

    keys: set[Key]
    """Publications whose records are damaged."""
    is_state: bool
    """Whether the ranges also hold records that are no messages, so that sessions and groups may be as of earlier."""


def harm_of(found: Iterable[Found], *ranges: tuple[int, int]) -> Harm:
    """Return what ranges of positions hold, given all records of the log. A range is its beginning and its end."""
    hit = [one for one in found if any(one.position < end and begin < one.position + one.size for begin, end in ranges)]
    keys = {one.key for one in hit if one.key is not None}
    return Harm(keys, any(one.kind != Kind.MESSAGE for one in hit))
