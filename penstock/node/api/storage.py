"""The storage of the node over the admin API: the log and its segments, the index, the disk, retention, and the tables."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Final

import msgspec

from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Operation, PageQuery
from penstock.node.tablewriting import TableWriting
from penstock.store.store import Store

SEGMENTS_AT_ONCE: Final = 8
"""Segments that are described in one slice. For each a file is read, which may have to be opened."""

POSITION_DIGITS_MAX: Final = 20
"""Digits of a position, which is less than 2**64."""


class LogShown(msgspec.Struct, kw_only=True):
    """The log. Positions are byte offsets in the whole log, and the id of a message is the position of its record."""

    start: int
    expires_before: Annotated[int, msgspec.Meta(description="Messages before it have expired, unless they were carried on.")]
    end: int
    durable: Annotated[int, msgspec.Meta(description="Everything before it is on disk.")]
    committed: Annotated[int, msgspec.Meta(description="Everything before it is durable on all replicas in sync.")]
    size_bytes: int
    segments: int
    syncs: int


class IndexShown(msgspec.Struct, kw_only=True):
    """What the index takes, and whether its compactions keep up."""

    rows: Annotated[int, msgspec.Meta(description="An estimate.")]
    files_bytes: int
    memtables_bytes: int
    block_cache_bytes: int
    block_cache_max_bytes: int
    filters_bytes: Annotated[int, msgspec.Meta(description="Memory of the filters and indexes of open files.")]
    pending_compaction_bytes: int
    compactions_running: int
    slowed_bytes_per_s: Annotated[int, msgspec.Meta(description="Rate to which writes are slowed down; 0 if they are not.")]
    stopped: Annotated[bool, msgspec.Meta(description="Whether no writes are taken, because compactions are too far behind.")]
    errors: int


class DiskShown(msgspec.Struct, kw_only=True):
    """The disk, and what may be stored on it."""

    level: Annotated[str, msgspec.Meta(description="open, read_only (nothing new is stored) or exhausted (nothing is).")]
    why: str
    free_bytes: int
    total_bytes: int
    reserve_bytes: Annotated[int, msgspec.Meta(description="With less free, the node stores nothing new.")]
    index_free_bytes: Annotated[int | None, msgspec.Meta(description="Of the disk that has the index; null if not measured.")]
    refused: Annotated[int, msgspec.Meta(description="Records that were refused since the start.")]


class RetentionShown(msgspec.Struct, kw_only=True):
    """What is dropped from the log, and what keeps it."""

    enabled: bool
    retention_ms: int
    retention_bytes: int
    blocked_by: Annotated[str | None, msgspec.Meta(description="What keeps segments that must go; null if nothing does.")]
    waits_for: Annotated[str, msgspec.Meta(description="A sentence that says what ends that; empty if nothing is kept.")]
    snapshots: int
    last_snapshot: Annotated[int | None, msgspec.Meta(description="Position of the last snapshot of the index.")]
    pinned_bytes: Annotated[int, msgspec.Meta(description="Old records that are still needed, and were carried on.")]
    copied_bytes: int
    dropped_bytes: int
    dropped_segments: int


class TablesShown(msgspec.Struct, kw_only=True):
    """The Parquet tables."""

    writing: bool
    lag_bytes: int
    lag_segments: int
    failures: int
    dropped_bytes: Annotated[int, msgspec.Meta(description="Log that was dropped before the tables had it.")]


class StorageShown(msgspec.Struct, kw_only=True):
    """The storage of the node."""

    log: LogShown
    index: IndexShown
    disk: DiskShown
    retention: RetentionShown
    tables: Annotated[TablesShown | None, msgspec.Meta(description="null if the node writes no tables.")]
    queues: int


class SegmentShown(msgspec.Struct, kw_only=True):
    """A file of the log."""

    start: int
    end: int
    size_bytes: int
    first_stored_ms: Annotated[int, msgspec.Meta(description="When its first record was stored; 0 if it has none.")]
    open: Annotated[bool, msgspec.Meta(description="Whether records are being written to it.")]
    snapshot: Annotated[bool, msgspec.Meta(description="Whether a snapshot is where it begins, so that all before can go.")]


class SegmentPage(msgspec.Struct):
    """A page of segments, in order."""

    items: list[SegmentShown]
    next: str | None


class StorageOperations:
    """Serves the storage.

    Parameters:
        store: of the node.
        tables: writes the tables; None if the node writes none.
    """

    def __init__(self, store: Store, tables: TableWriting | None) -> None:
        self._store = store
        self._tables = tables

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation("getStorage", "GET", "/storage", ApiRole.VIEWER, "Show the storage.", self.show, StorageShown)
        yield Operation(
            "listSegments",
            "GET",
            "/storage/segments",
            ApiRole.VIEWER,
            "List the segments of the log.",
            self.segments,
            SegmentPage,
            PageQuery,
        )

    async def show(self, _call: ApiCall) -> StorageShown:
        """Return what the storage is like."""
        return StorageShown(
            log=self._log(),
            index=self._index(),
            disk=self._disk(),
            retention=self._retention(),
            tables=_tables(self._tables) if self._tables is not None else None,
            queues=len(self._store.queues),
        )

    async def segments(self, call: ApiCall) -> SegmentPage:
        """Return a page of segments."""
        asked: PageQuery = call.query
        if asked.after and not (asked.after.isascii() and asked.after.isdecimal() and len(asked.after) <= POSITION_DIGITS_MAX):
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"after is {asked.after[:80]!r}, which is not `next` of a page; begin without it"
            )
        segments = self._store.log.segments()
        begin = bisect_right(segments, int(asked.after), key=lambda segment: segment[0]) if asked.after else 0
        page = segments[begin : begin + asked.limit]
        snapshots, open_base = set(self._store.retention.snapshots), segments[-1][0]
        items: list[SegmentShown] = []
        for number, (start, end) in enumerate(page):
            if start < self._store.log.start:
                continue  # it was dropped meanwhile
            items.append(
                SegmentShown(
                    start=start,
                    end=end,
                    size_bytes=end - start,
                    first_stored_ms=self._store.log.stored_ms(start),
                    open=start == open_base,
                    snapshot=start in snapshots,
                )
            )
            if number % SEGMENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return SegmentPage(items, str(page[-1][0]) if begin + len(page) < len(segments) else None)

    def _log(self) -> LogShown:
        store, log = self._store, self._store.log
        return LogShown(
            start=log.start,
            expires_before=store.retention.expires_before,
            end=log.end,
            durable=store.durable_position,
            committed=store.committed_position,
            size_bytes=log.written - log.start,
            segments=len(log.segments()),
            syncs=store.syncs,
        )

    def _index(self) -> IndexShown:
        figures = self._store.index.figures()
        return IndexShown(
            rows=figures.rows,
            files_bytes=figures.files,
            memtables_bytes=figures.memtables,
            block_cache_bytes=figures.block_cache,
            block_cache_max_bytes=figures.block_cache_max,
            filters_bytes=figures.tables,
            pending_compaction_bytes=figures.pending_compaction,
            compactions_running=figures.running,
            slowed_bytes_per_s=figures.slowed_bytes_per_s,
            stopped=bool(figures.stopped),
            errors=figures.errors,
        )

    def _disk(self) -> DiskShown:
        space = self._store.space
        return DiskShown(
            level=space.level.name.lower(),
            why=space.why(),
            free_bytes=space.usage.free,
            total_bytes=space.usage.total,
            reserve_bytes=space.reserve,
            index_free_bytes=space.index_usage.free if space.index_usage is not None else None,
            refused=sum(space.refused.values()),
        )

    def _retention(self) -> RetentionShown:
        store, retention = self._store, self._store.retention
        blocker, snapshots = retention.blocked_by, retention.snapshots
        return RetentionShown(
            enabled=retention.enabled,
            retention_ms=store.options.retention_ms,
            retention_bytes=store.options.retention_bytes,
            blocked_by=blocker.value if blocker is not None else None,
            waits_for=blocker.why if blocker is not None else "",
            snapshots=len(snapshots),
            last_snapshot=snapshots[-1] if snapshots else None,
            pinned_bytes=store.copies.pinned_bytes,
            copied_bytes=retention.copied_bytes,
            dropped_bytes=retention.dropped_bytes,
            dropped_segments=retention.dropped_segments,
        )


def _tables(tables: TableWriting) -> TablesShown:
    return TablesShown(
        writing=tables.pid is not None,
        lag_bytes=tables.lag_bytes,
        lag_segments=tables.lag_segments,
        failures=tables.failures,
        dropped_bytes=tables.dropped_bytes,
    )
