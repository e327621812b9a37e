"""Verifies a backup, or the data directory of a stopped node: every byte, every record, and every row of the index.

The index must be the function of the log that a node computes. To prove that, `verify` builds an index from the log alone, or
from a snapshot and the log where the beginning was dropped, by the recovery of a node. It recovers the stored index too, so
that both cover the whole log, and compares them (`penstock.backup.comparison`). All of that happens in a working directory with
links to the files, so nothing of what is verified changes.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from penstock.access import bans
from penstock.access.errors import AccessInvalid
from penstock.backup.backup import SYSTEM_COPY_FILES, lock_backup
from penstock.backup.comparison import Difference, compare, expire_retained, settle, stale_pinned
from penstock.backup.copying import CHUNK_BYTES, Copier, CopyFiles, CopyMeter, Pace
from penstock.backup.errors import BackupFailed, BackupInvalid
from penstock.backup.manifest import is_backup, load_manifest
from penstock.backup.restore import MEND, absence_of, damage_of, write_mark
from penstock.backup.source import index_files
from penstock.node.config import Config
from penstock.node.lock import DataDirLock
from penstock.node.parts import NodeParts
from penstock.pop.core.handle import SECRET
from penstock.store.clock import SystemClock
from penstock.store.errors import DiskFull, SnapshotInvalid, StoreError
from penstock.store.files import FULL, LOST_FOUND, Mode, write_all
from penstock.store.index import index
from penstock.store.index.index import Index
from penstock.store.log import syncmark
from penstock.store.log.block import read_block
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.segment import LOG_DIRECTORY, SUFFIX, segment_base, segment_name
from penstock.store.options import StoreOptions
from penstock.store.record import HEADER_BYTES, store_ms_of
from penstock.store.recovery.recovery import REPLAY_BYTES
from penstock.store.recovery.repair import survey
from penstock.store.snapshots import snapshotreader
from penstock.store.snapshots.snapshotreader import SnapshotReader
from penstock.store.snapshots.snapshotwriter import snapshots
from penstock.store.store import Store

BACKUP = "backup"

DIFFERENCES_MAX = 20
"""Differences of a key space that are kept. The others are counted."""


@dataclass(slots=True)
class Verification:
    """What was verified, and what is wrong."""

    kind: str = ""
    """`backup` or `data directory`."""
    start: int = 0
    """Position of the oldest record."""
    end: int = 0
    """Position after the last record."""
    built_from: str = ""
    """What the index was built from anew."""
    has_index: bool = False
    """Whether there is a stored index with rows, which were compared."""
    replayed: int = 0
    """Records that were applied to build it."""
    snapshots: int = 0
    """Snapshots that were read."""
    rows_bytes: int = 0
    """Bytes of the rows that were compared."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, apart from rows of the index."""
    differences: dict[str, list[Difference]] = field(default_factory=dict)
    """By key space, up to `DIFFERENCES_MAX` rows of the index that are not what the log says."""
    counts: dict[str, int] = field(default_factory=dict)
    """By key space, how many such rows there are."""
    notes: list[str] = field(default_factory=list)
    """What is not wrong, but worth knowing."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not self.counts


def verify(
    directory: Path,
    *,
    meter: CopyMeter,
    pace: Pace | None = None,
    work_dir: Path | None = None,
    files: CopyFiles = SYSTEM_COPY_FILES,
) -> Verification:
    """Verify a backup, or the data directory of a stopped node, and return what was found.

    Args:
        directory: of the backup, or of the node.
        meter: is told of each piece.
        pace: bounds the rate at which files are read.
        work_dir: for the index that is built, which takes as much room as the stored one, and two copies of the last segment;
            the system's directory for temporary files if it is None.
        files: have the directory.

    Raises:
        BackupFailed: the directory is neither, or the working directory has too little room.
        DataDirLocked: a node runs on it.
        OSError: a file can't be read, or the working directory can't be written.
    """
    began_s = time.monotonic()
    found = Verification()
    with ExitStack() as stack:
        if is_backup(directory, files):
            found.kind = BACKUP
            stack.enter_context(lock_backup(directory, is_shared=True))
            originals = _check_backup(directory, found, Copier(files, meter, pace or Pace()), files, meter)
        elif files.is_directory(directory / LOG_DIRECTORY):
            found.kind = "data directory"
            stack.enter_context(DataDirLock(directory))
            originals = _data_dir_files(directory, files)
        else:
            raise BackupFailed(f"{directory} is neither a backup nor a data directory; name one of them")
        _check_bans(originals, found)
        if not found.problems:
            work = stack.enter_context(_working_directory(work_dir))
            try:
                _verify_state(originals, work, found, meter)
            except (OSError, DiskFull) as error:
                if isinstance(error, OSError) and error.errno not in FULL:
                    raise
                raise BackupFailed(
                    f"the working directory {work} has too little room for a second index ({error}); name another directory "
                    "with --work-dir"
                ) from error
    found.seconds = round(time.monotonic() - began_s, 3)
    return found


# --- files --------------------------------------------------------------------------------------------------------------

_Originals = dict[str, Path]
"""The files that are verified, by their paths in a data directory."""


def _check_backup(directory: Path, found: Verification, copier: Copier, files: CopyFiles, meter: CopyMeter) -> _Originals:
    try:
        manifest = load_manifest(directory, files)
    except BackupInvalid as error:
        found.problems.append(str(error))
        return {}
    found.start, found.end = manifest.start, manifest.durable
    meter.expect(manifest.bytes, "Reading")
    for file in manifest.files:
        try:
            problem = absence_of(directory, file, files)
            if not problem:
                problem = damage_of(directory, file, copier.checksum_of(directory / file.stored, file.size))
        except OSError as error:
            problem = f"the file {directory / file.stored} of the backup can't be read ({error.strerror})"
        if problem:
            found.problems.append(f"{problem}; {MEND}")
    return {file.path: directory / file.stored for file in manifest.files}


def _data_dir_files(directory: Path, files: CopyFiles) -> _Originals:
    paths = [SECRET, bans.FILE, syncmark.FILE, index.DAMAGED]
    for folder in (LOG_DIRECTORY, snapshotreader.DIRECTORY):
        paths += [f"{folder}/{name}" for name in files.names(directory / folder) if name != LOST_FOUND]
    paths += [f"{index.DIRECTORY}/{name}" for name in index_files(directory / index.DIRECTORY, files)]
    return {path: directory / path for path in paths if files.exists(directory / path)}


def _check_bans(originals: _Originals, found: Verification) -> None:
    path = originals.get(bans.FILE)
    if path is None or found.problems:
        return
    try:
        bans.read_bans(path)
    except AccessInvalid as error:
        found.problems.append(f"no node starts on these bans: {error}")


@contextmanager
def _working_directory(parent: Path | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="penstock-verify-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _lay_out(originals: _Originals, data_dir: Path, found: Verification, *, with_index: bool) -> None:
    """Make a data directory of links to the originals, and of copies of those that a recovery may write to.

    Those are the last segment, and a sealed one that was not cut.
    """
    names = [name for name, _ in _in(originals, LOG_DIRECTORY)]
    bases = sorted(segment_base(Path(name)) for name in names if name.endswith(SUFFIX))
    written_to = {segment_name(base) for base in bases[-1:]}
    written_to |= {
        segment_name(base)
        for base, following in pairwise(bases)
        if originals[f"{LOG_DIRECTORY}/{segment_name(base)}"].stat().st_size != following - base
    }
    for folder in (LOG_DIRECTORY, snapshotreader.DIRECTORY, *([index.DIRECTORY] if with_index else [])):
        (data_dir / folder).mkdir(mode=0o700, parents=True)
        for name, original in _in(originals, folder):
            if name in written_to or (folder == index.DIRECTORY and not name.endswith(".sst")):
                _copy(original, data_dir / folder / name)
            else:
                (data_dir / folder / name).symlink_to(original.resolve())
    for path in (SECRET, syncmark.FILE):
        if path in originals:
            _copy(originals[path], data_dir / path)
    if found.kind == BACKUP:
        write_mark(data_dir, found.start, found.end, SYSTEM_COPY_FILES)


def _in(originals: _Originals, folder: str) -> list[tuple[str, Path]]:
    """Return name and path of the originals in a folder of a data directory."""
    return [
        (path.removeprefix(f"{folder}/"), original) for path, original in originals.items() if path.startswith(f"{folder}/")
    ]


def _copy(original: Path, path: Path) -> None:
    """Copy a file without its holes: an open segment is one for the most part."""
    files = SYSTEM_COPY_FILES
    source = files.open(original)
    target = files.open(path, Mode.NEW, permissions=0o600)
    try:
        offset, size = 0, source.size()
        while offset < size and (found := source.data_from(offset)) is not None:
            begin, offset = found
            for at in range(begin, offset, CHUNK_BYTES):
                write_all(target, source.pread(min(CHUNK_BYTES, offset - at), at), at)
        target.truncate(size)
    finally:
        source.close()
        target.close()


# --- log and index ------------------------------------------------------------------------------------------------------


def _verify_state(originals: _Originals, work: Path, found: Verification, meter: CopyMeter) -> None:
    built, stored = work / "built", work / "stored"
    _lay_out(originals, built, found, with_index=False)
    _check_log(built, found, meter)
    _check_snapshots(built, found)
    if found.problems:
        return
    if index.DAMAGED in originals:
        reason = originals[index.DAMAGED].read_text().strip()
        found.problems.append(f"the index is marked as damaged, and the next start rebuilds it: {reason}")
    _lay_out(originals, stored, found, with_index=True)
    with ExitStack() as stack:
        expected = _recovered(built, found, meter, "Rebuilding", stack)
        if expected is None:
            return
        log, entries_from = expected.store.log, expected.store.entries_from
        found.start, found.end = log.start, log.end
        _check_order(log, found)
        if entries_from > found.start:
            found.notes.append(
                f"the snapshot at position {found.start}, where the log begins, is missing, so the entries of light queues "
                f"before position {entries_from}, of the next snapshot, can't be compared"
            )
        if not _is_comparable(stored, found, entries_from):
            return
        actual = _recovered(stored, found, meter, "Replaying", stack)
        if actual is None:
            return
        now_ms = expected.store.now_ms()
        settle(expected.store)
        expire_retained(expected, now_ms)
        found.has_index = True
        try:
            stale = stale_pinned(actual.store)
            if stale:
                found.notes.append(
                    f"{stale} pinned entries name records that nothing carries forward, as after a kill during an expiry; the "
                    "next expiry deletes them"
                )
            settle(actual.store)
            expire_retained(actual, now_ms)
            _compare(actual.store, expected.store, found, meter)
        except (OSError, DiskFull):
            raise
        except Exception as error:  # as in `_recovered`
            found.problems.append(f"the index has rows that can't be read: {error!r}")


def _check_log(data_dir: Path, found: Verification, meter: CopyMeter) -> None:
    """Read every record of the log."""
    paths = (data_dir / LOG_DIRECTORY).iterdir()
    meter.expect(sum(path.stat().st_size for path in paths), "Checking")
    try:
        findings = survey(data_dir, on_read=meter.advance)
    except StoreError as error:
        found.problems.append(str(error))
        return
    for damage in findings.damages:
        found.problems.append(
            f"{damage.length} bytes of the log are damaged at position {damage.position} of segment {damage.segment}; "
            + ("use another backup" if found.kind == BACKUP else "restore that file from a backup, or run `penstock repair`")
        )
    if findings.torn_bytes:
        found.notes.append(
            f"{findings.torn_bytes} bytes after the last record are a torn tail, which the next start clears: the node did not "
            "stop in order"
        )


def _check_order(log: CommitLog, found: Verification) -> None:
    """Compare the times of all records, which never decrease along a log.

    Records don't hold their positions, so they are valid in a wrong place too. A start compares the first records of segments
    only, which may have equal times.
    """
    position = last_ms = 0
    while (position := max(position, log.start)) < log.written:
        block = read_block(log, position, REPLAY_BYTES)
        for at in block.offsets:
            store_ms = store_ms_of(block.data[at : at + HEADER_BYTES])
            if store_ms < last_ms:
                found.problems.append(
                    f"the record at position {block.base + at} is older than the one before it, so segment "
                    f"{log.segment_at(block.base + at).path.name} or the one before it is in a wrong place, or has records of "
                    "another log"
                )
                return
            last_ms = store_ms
        position = block.end


def _check_snapshots(data_dir: Path, found: Verification) -> None:
    """Read every row of every snapshot."""
    bases = {segment_base(path) for path in (data_dir / LOG_DIRECTORY).glob(f"*{SUFFIX}")}
    for position in snapshots(data_dir):
        if position not in bases:
            found.notes.append(f"the snapshot at position {position} is of no use, since no segment begins there")
            continue
        found.snapshots += 1
        try:
            for _ in SnapshotReader(data_dir, position).blocks():
                pass
        except SnapshotInvalid as error:
            found.problems.append(str(error))


def _is_comparable(data_dir: Path, found: Verification, built_from: int) -> bool:
    """Return whether there is a stored index with rows, which can be opened and covers no more than the log has.

    It can't be compared either if it knows more than the log, because a repair has kept it, and the other index was built from
    a position (`built_from`) before that repair. That there is none is no problem: a node that was killed before its first
    flush leaves it empty, and a repair may delete it.
    """
    if not any((data_dir / index.DIRECTORY).iterdir()):
        found.notes.append(f"there is no index, so the next start builds it from {found.built_from}")
        return False
    try:
        stored = Index(data_dir, read_only=True)
        try:
            covered, adjusted = stored.covered(), stored.adjusted()
            rows = sum(1 for _ in stored.rows(b"")) if adjusted > built_from else 0
        finally:
            stored.close()
    except (StoreError, OSError) as error:
        found.problems.append(f"the index can't be used, so the next start rebuilds it: {error}")
        return False
    if covered is None:
        found.notes.append(f"the index is empty, so the next start builds it from {found.built_from}")
        return False
    if adjusted > built_from:
        found.notes.append(
            f"`penstock repair` has kept the index when the log was damaged, so it knows more of the messages before position "
            f"{adjusted} than the log. It can be compared again when retention has dropped what was before. All its {rows} "
            "rows can be read"
        )
        return False
    if covered.position < found.start:
        found.notes.append(
            f"the index covers the log up to {covered.position}, but the log begins at {found.start}, as after a kill during "
            f"an expiry; the next start builds a new one from {found.built_from}"
        )
        return False
    if covered.position > found.end:
        found.problems.append(
            f"the index covers the log up to {covered.position}, but the log goes from {found.start} to {found.end}, so the "
            "next start rebuilds it"
        )
        return False
    return True


def _recovered(data_dir: Path, found: Verification, meter: CopyMeter, what: str, stack: ExitStack) -> NodeParts | None:
    """Return the parts of a data directory after its recovery, as a node does it; None if that fails, which is noted."""
    options = replace(StoreOptions(), retention_ms=0, retention_bytes=0, reserve_bytes=0, ballast_bytes=0)
    try:
        parts = NodeParts(replace(Config(), data_dir=data_dir, store=options), SystemClock())
        store = parts.store
        reached = store.log.start
        meter.expect(store.log.end - reached, what)

        def on_replayed(position: int) -> None:
            nonlocal reached
            meter.advance(max(position - reached, 0))
            reached = max(position, reached)

        store.on_replayed = on_replayed
        recovery = store.recover()  # closes the files if it raises
        stack.callback(store.abandon)
    except (OSError, DiskFull):
        raise
    except Exception as error:  # a row with arbitrary content may make its part raise anything
        found.problems.append(f"a start on it fails: {error!r}")
        return None
    if what == "Rebuilding":
        found.replayed = recovery.replayed
        found.built_from = "the log and a snapshot" if store.log.start else "the log"
    elif recovery.rebuilt:
        found.problems.append("the index can't be used, so the next start rebuilds it")
        return None
    return parts


def _compare(stored: Store, expected: Store, found: Verification, meter: CopyMeter) -> None:
    meter.expect(0, "Comparing")

    def on_row(size: int) -> None:
        found.rows_bytes += size
        meter.advance(size)

    for difference in compare(stored, expected, on_row):
        space = difference.space
        found.counts[space] = found.counts.get(space, 0) + 1
        kept = found.differences.setdefault(space, [])
        if len(kept) < DIFFERENCES_MAX:
            kept.append(difference)
