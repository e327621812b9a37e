"""What a start does: open the log and an index that agrees with it, then apply the records that the index lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from penstock.store.errors import (
    DataDirIncompatible,
    IndexDamaged,
    LogCorrupt,
    RecordCorrupt,
    RecordUnreadable,
    SnapshotInvalid,
)
from penstock.store.files import SYSTEM_FILES, Files
from penstock.store.index.index import Covered, Index, Upgrade, keep_rows
from penstock.store.index.rocksdb import OpenDatabase, open_rocksdb
from penstock.store.index.rowformats import FORMAT
from penstock.store.log.block import Block, read_block
from penstock.store.log.commitlog import CommitLog
from penstock.store.properties import decode_properties, tag_hash
from penstock.store.queues.queues import Queues
from penstock.store.queues.router import Router
from penstock.store.record import CRC_FROM, HEADER, HEADER_BYTES, OBSERVED, UNROUTED, Kind, Record, checksum, decode
from penstock.store.recovery.indexplan import whole_snapshot
from penstock.store.snapshots.snapshotreader import DIRECTORY as SNAPSHOTS
from penstock.store.snapshots.snapshotreader import snapshot_path
from penstock.store.snapshots.snapshotwriter import give_own_names, restore, snapshots

logger = structlog.get_logger("store")

REPLAY_BYTES = 4 * 1024 * 1024
"""Bytes of log that a replay applies between two index writes. This bounds its memory."""

_MESSAGE = int(Kind.MESSAGE)


class Recovery(NamedTuple):
    """What a start found and did."""

    torn_bytes: int
    """Bytes after the last whole record that were not a record. They are cleared."""
    replayed: int
    """Records that were applied again."""
    rebuilt: bool
    """Whether the index was built anew from the log or from a snapshot."""
    skipped_bytes: int
    """Bytes between the beginning of the log and the snapshot from which the index was built anew. What sessions and groups had
    not got of them is lost to them."""
    seconds: float
    """How long the start took."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A log and an index that agree: the index covers no more than the log has."""

    index: Index
    covered: Covered | None
    """How far the index covers the log; None when it is empty."""
    torn_bytes: int
    rebuilt: bool
    skipped_bytes: int
    """See `Recovery`."""


def agree(
    data_dir: Path,
    log: CommitLog,
    files: Files = SYSTEM_FILES,
    open_database: OpenDatabase = open_rocksdb,
    upgrade: Upgrade = keep_rows,
) -> Agreement:
    """Find the end of the log and open the index, or build a new one where the old one is damaged or doesn't fit the log.

    Args:
        data_dir: of the node.
        log: is open, and its end is not known yet.
        files, open_database: have the directory.
        upgrade: brings the rows of the format before to the present one.

    Raises:
        LogCorrupt: the log is damaged before its tail; or its beginning was dropped, and neither an index nor a snapshot tells
            what it held.
        OSError: a file can't be read or written.
    """
    _name_snapshots(data_dir, files)
    open_index = partial(Index, data_dir, files=files, open_database=open_database)
    index, covered, misfit = _open_index(data_dir, files, open_index, upgrade)
    try:
        tail = log.recover(covered.durable if covered else 0)
    except BaseException:
        if index is not None:
            index.close()
        raise
    if covered is not None and not log.start <= covered.position <= tail.end:
        misfit = f"it covers the log up to {covered.position}, but the log goes from {log.start} to {tail.end}"
    if index is None or misfit:
        if index is not None:
            index.close()
        if log.start and whole_snapshot(data_dir, log.start, lambda: log.end, files) is None:
            raise _unknown_beginning(data_dir, log, misfit)  # the index stays: `penstock repair` may need it
        logger.warning("index.rebuild", reason=misfit)
        Index.destroy(data_dir, files)
        index, covered = open_index(), None
    rebuilt = covered is None and log.end > 0
    skipped_bytes = 0
    if covered is None and log.start:
        index, covered = _begin_with_snapshot(data_dir, log, index, files, open_index, upgrade)
        skipped_bytes = covered.position - log.start
    return Agreement(index, covered, tail.torn_bytes, rebuilt, skipped_bytes)


def _name_snapshots(data_dir: Path, files: Files) -> None:
    """Give snapshots that have each other's names their own, so that an index that is built anew begins with the oldest."""
    try:
        for name, own in give_own_names(data_dir, files).items():
            logger.warning(
                "snapshot.renamed",
                file=str(data_dir / SNAPSHOTS / own),
                was=name,
                why="the snapshot says in its first record at which position it was made; a bad restore may have renamed it",
            )
    except OSError as error:
        # Without their own names these snapshots can't be used, but the node may need none of them.
        logger.error("snapshot.misnamed", folder=str(data_dir / SNAPSHOTS), error=str(error))


def _open_index(
    data_dir: Path, files: Files, open_index: Callable[[], Index], upgrade: Upgrade
) -> tuple[Index | None, Covered | None, str]:
    """Return the index and how far it covers the log; without an index, the reason to rebuild it."""
    reason = Index.damage_of(data_dir, files)
    if reason:
        return None, None, reason
    try:
        index = open_index()
    except IndexDamaged as error:
        return None, None, str(error)
    try:
        if index.upgrade(upgrade):
            logger.info("index.upgraded", format=FORMAT)
        return index, index.covered(), ""
    except (DataDirIncompatible, IndexDamaged) as error:
        index.close()
        return None, None, str(error)


def _begin_with_snapshot(
    data_dir: Path, log: CommitLog, index: Index, files: Files, open_index: Callable[[], Index], upgrade: Upgrade
) -> tuple[Index, Covered]:
    """Restore the oldest snapshot that fits the log into an empty index."""
    for position in snapshots(data_dir, files):
        if not log.start <= position <= log.end:
            continue
        try:
            covered = restore(data_dir, position, index, upgrade, files)
            if position > log.start:
                _warn_of_later(data_dir, log, position)
            return index, covered
        except SnapshotInvalid as error:
            logger.error("snapshot.invalid", position=position, error=str(error))
            index.close()
            Index.destroy(data_dir, files)
            index = open_index()
    index.close()
    raise _unknown_beginning(data_dir, log, "there is none with rows")


def _warn_of_later(data_dir: Path, log: CommitLog, position: int) -> None:
    logger.warning(
        "snapshot.later",
        file=str(snapshot_path(data_dir, log.start)),
        why="this snapshot, where the log begins, is missing or damaged, so the index was built from a later one",
        position=position,
        begin=log.start,
        effect=f"messages before position {position} that sessions and groups had not got are lost to them",
        todo="to get them, stop the node, restore the file and the folder `index` from a backup, and start it again",
    )


def _unknown_beginning(data_dir: Path, log: CommitLog, why: str) -> LogCorrupt:
    return LogCorrupt(
        f"the log begins at position {log.start}, and nothing tells what was before: the index can't be used ({why}), and "
        f"{data_dir / SNAPSHOTS} has no whole snapshot from that position on. Restore that folder or the index from a backup, "
        "or run `penstock repair`, which keeps what it can and says what is lost"
    )


class Replay:
    """Applies the records of the log that the index does not cover yet, block by block.

    Parameters:
        log: what is replayed.
        position: up to where the index covers it.
        queues: get the entries of messages.
        router: finds those queues.
        last_ms: when the last record that the index covers was stored, in ms since 1970.
        apply: applies a record that is not a plain message.
        save: writes the changes to the index. It gets the position up to which the index then covers the log, and when the last
            record before it was stored.
    """

    def __init__(
        self,
        log: CommitLog,
        position: int,
        queues: Queues,
        router: Router,
        last_ms: int,
        *,
        apply: Callable[[Record], None],
        save: Callable[[int, int], None],
    ) -> None:
        self._log = log
        self.position = position
        """All records before this position have been applied."""
        self.replayed = 0
        """How many this object has applied."""
        self._queues = queues
        self._router = router
        self._last_ms = last_ms
        self._apply = apply
        self._save = save

    def step(self, until: int, bytes_max: int = REPLAY_BYTES) -> None:
        """Apply records up to `until`, where one begins: those of one segment, about `bytes_max` bytes, at least one record.

        Raises:
            LogCorrupt: a record is damaged, or the disk can't read it.
        """
        if self.position < until:
            try:
                block = read_block(self._log, self.position, bytes_max, until)
                self._replay_block(block)
            except RecordUnreadable as error:
                raise LogCorrupt(f"the node does not start: {error}") from error
            except RecordCorrupt as error:
                named = RecordCorrupt(error.position, error.reason, self._log.segment_at(error.position).path.name)
                raise LogCorrupt(
                    f"the node does not start: {named}; restore the file from a backup, or run `penstock repair`"
                ) from error
            self.replayed += len(block.offsets)
            self.position = block.end
        self._save(self.position, self._last_ms)

    def _replay_block(self, block: Block) -> None:
        # Plain messages are most of a log, so their headers are read in place.
        data, base = block.data, block.base
        unpack, route_of, dispatch = HEADER.unpack_from, self._router.route_stored, self._queues.dispatch
        for at in block.offsets or (0,):
            if at + HEADER_BYTES <= len(data):
                size, crc, kind, flags, topic_len, props_len, store_ms = unpack(data, at)
                topic_stop = at + HEADER_BYTES + topic_len
                is_plain = kind == _MESSAGE and not props_len and not flags & OBSERVED and topic_stop <= at + size
                if is_plain and checksum(data[at + CRC_FROM : at + size]) == crc:
                    self._last_ms = store_ms
                    dispatch(route_of(data[at + HEADER_BYTES : topic_stop]), base + at, size, 0)
                    continue
            self._replay_record(decode(data, at, position=base + at))

    def _replay_record(self, found: Record) -> None:
        self._last_ms = found.store_ms
        if found.kind == _MESSAGE and not found.flags & UNROUTED:
            tag = decode_properties(found.properties).tag
            self._queues.dispatch(self._router.route_stored(found.topic), found.position, found.size, tag_hash(tag))
        if found.kind != _MESSAGE or found.flags & OBSERVED:
            self._apply(found)
