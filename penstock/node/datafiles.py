"""Checks the files of a data directory beside the log, for `penstock repair`: secret, sync mark, snapshots, unknown files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.access import bans
from penstock.access.errors import AccessInvalid
from penstock.cluster import bootstrap, replicafile
from penstock.node import lastbackup
from penstock.node.controladdress import SOCKET
from penstock.node.errors import ConfigError
from penstock.node.lock import LOCK_NAME, RESTORING
from penstock.pop import relayed
from penstock.pop.core.handle import SECRET, SECRET_BYTES
from penstock.spark.parquet.files import DIRECTORY as TABLES
from penstock.store import timekeeping
from penstock.store.errors import SnapshotInvalid
from penstock.store.files import LOST_FOUND, SYSTEM_FILES, Files, read_file, replace_file
from penstock.store.index import index
from penstock.store.log import placing, syncmark
from penstock.store.log.quarantine import QUARANTINE, free_name, set_aside
from penstock.store.log.rewriting import FRESH_SUFFIX
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.log.segment import SUFFIX as SEGMENT_SUFFIX
from penstock.store.snapshots import snapshotreader, snapshotwriter
from penstock.store.space import ballast

KNOWN = frozenset(
    (
        ballast.FILE,
        bans.FILE,
        LOG_DIRECTORY,
        index.CHECKPOINT,
        index.DAMAGED,
        index.DIRECTORY,
        index.DISCARDED,
        snapshotreader.DIRECTORY,
        syncmark.FILE,
        timekeeping.FILE,
        bootstrap.DIRECTORY,
        replicafile.FILE,
        lastbackup.FILE,
        relayed.PLAIN,
        relayed.TLS,
        LOCK_NAME,
        LOST_FOUND,
        QUARANTINE,
        RESTORING,
        SECRET,
        SOCKET,
        TABLES,
    )
)
"""Names that a node or `penstock tables` uses in the data directory. Those of a node also have `.new` after them while such a
file is being replaced."""

NEW_HANDLES = (
    "all handles that are out become void: consumers get open deliveries again after their invisible time, delayed messages "
    "can't be recalled, and open transactions are asked for again"
)


STRANGERS_SHOWN = 3
"""How many files that are not a node's are named in an error."""


def refuse_foreign(data_dir: Path, own: Iterable[Path] = (), files: Files = SYSTEM_FILES) -> None:
    """Refuse a directory that has files of somebody else, and none of a node. A node would put its files between them.

    Args:
        data_dir: where a node is about to start. It may be missing.
        own: files that the node's options name, which may be there before the first start.
        files: has the directory.

    Raises:
        ConfigError: it is such a directory.
        OSError: the directory can't be listed.
    """
    names = set(files.names(data_dir)) if files.exists(data_dir) else set()
    strangers = sorted(names - KNOWN - {path.name for path in own if path.absolute().parent == data_dir.absolute()})
    if strangers and not names & KNOWN - {LOST_FOUND}:
        shown = ", ".join(strangers[:STRANGERS_SHOWN]) + (" ..." if len(strangers) > STRANGERS_SHOWN else "")
        raise ConfigError(
            f"The data directory {data_dir} has files that are not of a node ({shown}), and none of a node. Name an empty or a "
            "new directory with --data-dir or data_dir. Nothing was changed."
        )


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Something wrong with a file of a data directory."""

    file: str
    """Path in the data directory."""
    problem: str
    """What is wrong, as words that follow the name of the file."""
    effect: str
    """What that means, and what to do, as a sentence."""
    is_damage: bool = False
    """Whether the node can't start, or would rely on a damaged file, until it is mended."""
    is_mendable: bool = False
    """Whether `mend_file` can mend it."""


def check_files(data_dir: Path, *, files: Files = SYSTEM_FILES) -> list[FileProblem]:
    """Return what is wrong with the files of a data directory beside the log. No process may have it open. Nothing is changed.

    Raises:
        OSError: a folder can't be listed.
    """
    return [
        *_secret(data_dir, files),
        *_bans(data_dir, files),
        *_mark(data_dir, files),
        *_last_backup(data_dir, files),
        *_snapshots(data_dir, files),
        *_others(data_dir, files),
    ]


def _secret(data_dir: Path, files: Files) -> Iterator[FileProblem]:
    try:
        found = len(read_file(files, data_dir / SECRET))
    except FileNotFoundError:
        if any(name.endswith(SEGMENT_SUFFIX) for name in files.names(data_dir / LOG_DIRECTORY)):
            yield FileProblem(
                SECRET, "is missing", f"Restore it from a backup. Otherwise the next start makes a new one, and {NEW_HANDLES}."
            )
        return
    except OSError as error:
        is_disk = error.errno == errno.EIO
        effect = _restore_secret() if is_disk else "Run the command as the user of the node, or mend the permissions."
        yield FileProblem(SECRET, f"can't be read ({error.strerror})", effect, is_damage=True, is_mendable=is_disk)
        return
    if found != SECRET_BYTES:
        problem = f"has {found} bytes, but should have {SECRET_BYTES}"
        yield FileProblem(SECRET, problem, _restore_secret(), is_damage=True, is_mendable=True)


def _restore_secret() -> str:
    return (
        "The node can't start. Restore it from a backup if there is one. Otherwise `penstock repair` makes a new one, and "
        f"{NEW_HANDLES}."
    )


def _bans(data_dir: Path, files: Files) -> Iterator[FileProblem]:
    try:
        bans.read_bans(data_dir / bans.FILE, files)
    except (AccessInvalid, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error.__cause__)
        yield FileProblem(
            bans.FILE,
            f"can't be read ({why})",
            "The node can't start. Restore it from a backup if there is one. Otherwise `penstock repair` sets it aside, which "
            "lifts all bans.",
            is_damage=True,
            is_mendable=not isinstance(error, OSError) or error.errno == errno.EIO,
        )


def _mark(data_dir: Path, files: Files) -> Iterator[FileProblem]:
    mark = syncmark.SyncMark(data_dir, files=files)
    if mark.read() is None and mark.problem:
        yield FileProblem(
            syncmark.FILE,
            f"can't be used: {mark.problem}",
            "The next start does without it and writes a new one. Nothing tells up to where the log was durable and where it "
            "began, so segments that are missing at its beginning or end go unnoticed: compare the folder commitlog with a "
            "backup.",
        )


def _last_backup(data_dir: Path, files: Files) -> Iterator[FileProblem]:
    try:
        lastbackup.read_last_backup(data_dir, files)
    except (OSError, ValueError) as error:
        effect = "The node does not know when the last backup was, until the next one replaces the file."
        yield FileProblem(lastbackup.FILE, f"can't be used: {error}", effect)


def _snapshots(data_dir: Path, files: Files) -> Iterator[FileProblem]:
    names = files.names(data_dir / snapshotreader.DIRECTORY)
    moves = snapshotwriter.misnamed(data_dir, files)
    for name in names:
        path = f"{snapshotreader.DIRECTORY}/{name}"
        stem = name.removesuffix(snapshotreader.SUFFIX)
        if name in moves:
            effect = f"The next start gives it its own name, {moves[name]}; so does `penstock repair`."
            yield FileProblem(path, "has the name of another snapshot", effect)
            continue
        if name == placing.MARKER or name.endswith(placing.SUFFIX):
            yield FileProblem(path, "belongs to a start that was interrupted", "The next start gives it its own name.")
            continue
        if stem == name:
            yield FileProblem(path, "is half written", "The next start deletes it.")
            continue
        effect = (
            "`penstock repair` moves it to the folder damaged, so that the node doesn't delete segments because of it. The "
            "next snapshot takes its place."
        )
        if not stem.isdigit():
            yield FileProblem(path, "is no snapshot, whose name is a position", effect, is_damage=True, is_mendable=True)
            continue
        try:
            for _ in snapshotreader.SnapshotReader(data_dir, int(stem), files).blocks():
                pass
        except (SnapshotInvalid, OSError, ValueError, KeyError) as error:
            yield FileProblem(path, f"can't be used: {error}", effect, is_damage=True, is_mendable=True)


def _others(data_dir: Path, files: Files) -> Iterator[FileProblem]:
    leave = "No node has put it there. `penstock repair` leaves it; move it away if nobody needs it."
    for name in files.names(data_dir):
        if name.removesuffix(".new") not in KNOWN:
            yield FileProblem(name, "is unknown", leave)
    for name in files.names(data_dir / LOG_DIRECTORY):
        if name.endswith(FRESH_SUFFIX):
            yield FileProblem(f"{LOG_DIRECTORY}/{name}", "is half written", "The next start deletes it.")
        elif name.endswith(placing.SUFFIX):
            again = "Run `penstock repair` without --dry-run."
            yield FileProblem(f"{LOG_DIRECTORY}/{name}", "is left over from a repair that was interrupted", again)
        elif name != LOST_FOUND and not name.endswith(SEGMENT_SUFFIX):
            yield FileProblem(f"{LOG_DIRECTORY}/{name}", "is unknown", leave)
    if files.exists(data_dir / index.DAMAGED):
        yield FileProblem(index.DAMAGED, "says that the index is damaged", "The next start rebuilds the index from the log.")


def mend_file(data_dir: Path, problem: FileProblem, *, files: Files = SYSTEM_FILES) -> str:
    """Mend a file; return where the old one is now, as a path in the data directory.

    Killed at any point, the next run goes on: until the old file is set aside, it is found again.

    Raises:
        OSError: a file can't be moved or written.
    """
    assert problem.is_mendable, problem
    path = data_dir / problem.file
    if problem.file == SECRET:
        aside = free_name(files, data_dir, SECRET)
        files.link(path, aside)
        files.sync_directory(aside.parent)
        replace_file(files, path, os.urandom(SECRET_BYTES), permissions=0o600)
        files.sync_directory(data_dir)
    else:
        aside = set_aside(files, data_dir, path)
    return f"{QUARANTINE}/{aside.name}"
