from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from penstock.store.index import rocksdb
from penstock.store.index.index import Index
from penstock.store.index.rocksdb import BLOCK_CACHE_BYTES_MIN, CACHE_BYTES_PER_BYTE, RocksDB
from penstock.store.options import MIB

CACHE_TABLE_BYTES = 8 * MIB
"""What the table of a block cache takes at most, which RocksDB allocates for the largest size of the cache."""


@pytest.mark.parametrize("times_opened", [1, 2, 3])
def test_an_index_has_the_configured_cache_however_often_it_was_opened(tmp_path: Path, times_opened: int) -> None:
    for _ in range(times_opened):
        database = RocksDB(tmp_path / "index", read_only=False)
        assert database.figures().block_cache_max == BLOCK_CACHE_BYTES_MIN
        database.close()


@pytest.mark.nightly
def test_blocks_of_files_that_are_gone_do_not_fill_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb, "BLOCK_CACHE_BYTES_MIN", MIB)
    monkeypatch.setattr(rocksdb, "BLOCK_CACHE_BYTES", 1 << 30)
    database, draw = RocksDB(tmp_path / "index", read_only=False), Random(17)
    keys = [b"%08d" % number for number in range(20_000)]
    for _ in range(20):
        changes = database.changes()
        for key in keys:
            changes.put(key, draw.randbytes(80))
        database.write(changes)
        database.flush()  # a compaction replaces the files again and again
        for key in keys[::20]:
            assert database.get(key) is not None
    figures = database.figures()
    assert figures.block_cache_max == MIB + CACHE_BYTES_PER_BYTE * figures.files
    assert figures.block_cache <= figures.block_cache_max + CACHE_TABLE_BYTES
    database.close()


def test_the_figures_of_an_index_say_what_it_takes(tmp_path: Path) -> None:
    index = Index(tmp_path)
    batch = index.batch()
    for number in range(1000):
        batch.put(b"Q%d" % number, b"x" * 1000)
    index.write(batch)
    before = index.figures()
    assert before.memtables > 1_000_000
    assert before.rows == 1000
    assert (before.files, before.tables) == (0, 0)
    index.flush()
    assert index.get(b"Q7") is not None
    after = index.figures()
    assert after.memtables < before.memtables
    assert min(after.files, after.tables, after.block_cache) > 0
    index.close()


def test_rows_of_a_prefix_of_any_length_are_found_in_all_files(tmp_path: Path) -> None:
    index = Index(tmp_path)
    keys = [space + name for space in (b"F", b"R") for name in (b"", b"a", b"a/b", b"a/b/c/d", b"a/bb/c", b"\xff\xff")]
    for key in keys:
        batch = index.batch()
        batch.put(key, key)
        index.write(batch)
        index.flush()  # one file for each
    for prefix in (b"F", b"Fa", b"Fa/b", b"Fa/b/c", b"Fa/b/c/d", b"R\xff", b"R", b"X"):
        expected = [(key, key) for key in sorted(keys) if key.startswith(prefix)]
        assert list(index.rows(prefix)) == expected
        assert list(index.rows(prefix, b"/b")) == [row for row in expected if row[0] >= prefix + b"/b"]
    index.close()
