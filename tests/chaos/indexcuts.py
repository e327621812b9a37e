"""Cuts the power of a disk under RocksDB, and checks what the index relies on: `python -m tests.chaos.indexcuts DIR CUTS`.

A node flushes its index without a write-ahead log, and counts on three things. What a power cut leaves is the content after one
of the writes. It is no older than the last flush that has returned. And the database opens, since RocksDB syncs a table before
its manifest names it. The disk keeps any subset of the blocks that RocksDB has not synced, so a sync that is missing or comes
too late would show. The process ends with status 1 if one of the three doesn't hold. It needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from random import Random

from penstock.store.index.rocksdb import open_rocksdb
from tests.chaos.campaign import hide_mounts
from tests.chaos.disk import Disk

DISK_BYTES = 96 << 20
NUMBER = b"number"
FLUSH_EVERY = 20
"""Writes between two flushes. A handful of flushes makes RocksDB compact, too."""
ROW_BYTES = 600
FLUSHES = (3, 12)
"""How many flushes a cut waits for."""


def key_of(number: int) -> bytes:
    """Return the key of the row that a write adds. Neighbours are far apart, so that compactions mix old and new rows."""
    return b"row %08x" % (number * 2_654_435_761 % 2**32)


def write(path: Path, *, flushes: bool) -> None:
    """Write to a database until it fails, and print the number of the last write that each flush has covered."""
    database, random = open_rocksdb(path, False), Random(os.getpid())
    number = int(database.get(NUMBER) or 0)
    while True:
        number += 1
        changes = database.changes()
        changes.put(key_of(number), b"%d " % number + random.randbytes(ROW_BYTES))
        changes.put(NUMBER, b"%d" % number)
        database.write(changes)
        if number % FLUSH_EVERY == 0:
            if flushes:
                database.flush()
            print(number, flush=True)


def check(path: Path, flushed: int) -> int:
    """Return the number of the last write that a database has; raise AssertionError if it lacks what it must have."""
    database = open_rocksdb(path, False)
    try:
        last = int(database.get(NUMBER) or 0)
        assert last >= flushed, f"write {flushed} was flushed, and the database has only {last} writes"
        for number in range(1, last + 1):
            row = database.get(key_of(number))
            assert row is not None, f"the database has write {last}, and lacks write {number}"
            assert row.startswith(b"%d " % number), f"write {number} is damaged"
        cursor = database.cursor()
        cursor.seek(b"row ")
        rows = 0
        while cursor.valid():
            rows += 1
            cursor.next()
        cursor.status()
        assert rows == last, f"the database has {rows} rows after {last} writes"
    finally:
        database.close()
    return last


async def cut_again_and_again(directory: Path, cuts: int, *, flushes: bool) -> None:
    """Cut the power `cuts` times while a process writes to a database, and check after each. Raises AssertionError."""
    disk, random = Disk(directory, DISK_BYTES), Random(1)
    await disk.create()
    try:
        for number in range(cuts):
            flushed = await _write_until_cut(disk, random, str(number), flushes=flushes)
            await disk.boot()
            last = check(disk.path / "index", flushed)
            print(f"cut {number}: write {flushed} was flushed, and there are {last} writes")
    finally:
        await disk.close()


async def _write_until_cut(disk: Disk, random: Random, seed: str, *, flushes: bool) -> int:
    """Return the number of the last write that was flushed when the power failed."""
    command = [sys.executable, "-m", "tests.chaos.indexcuts", "--write", str(disk.path / "index")]
    if not flushes:
        command.append("--unflushed")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    assert process.stdout is not None
    flushed = 0
    for _ in range(random.randint(*FLUSHES)):
        flushed = int(await process.stdout.readline())
    await asyncio.sleep(random.choice((0.0, 0.001, 0.005)))
    await disk.cut_power(seed)  # what is printed after this may have been flushed by a disk that is gone
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    return flushed


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.indexcuts", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("cuts", type=int, nargs="?", default=10)
    parser.add_argument("--write", type=Path, help="write to this database until it fails")
    parser.add_argument("--unflushed", action="store_true", help="do not flush, so that something is missing")
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write, flushes=not arguments.unflushed)
    hide_mounts()
    try:
        asyncio.run(cut_again_and_again(arguments.directory, arguments.cuts, flushes=not arguments.unflushed))
    except AssertionError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
