from __future__ import annotations

from pathlib import Path

import pytest

from penstock.store.index import BLOCK_CACHE_BYTES, Batch, Index


@pytest.mark.parametrize("times_opened", [1, 2, 3])
def test_an_index_has_the_configured_cache_however_often_it_was_opened(tmp_path: Path, times_opened: int) -> None:
    for _ in range(times_opened):
        index = Index(tmp_path)
        assert index._db.property_int_value("rocksdb.block-cache-capacity") == BLOCK_CACHE_BYTES
        index.close()


def test_rows_of_a_prefix_of_any_length_are_found_in_all_files(tmp_path: Path) -> None:
    index = Index(tmp_path)
    keys = [space + name for space in (b"F", b"R") for name in (b"", b"a", b"a/b", b"a/b/c/d", b"a/bb/c", b"\xff\xff")]
    for key in keys:
        batch = Batch()
        batch.put(key, key)
        index.write(batch)
        index.flush()  # one file for each
    for prefix in (b"F", b"Fa", b"Fa/b", b"Fa/b/c", b"Fa/b/c/d", b"R\xff", b"R", b"X"):
        expected = [(key, key) for key in sorted(keys) if key.startswith(prefix)]
        assert list(index.rows(prefix)) == expected
        assert list(index.rows(prefix, b"/b")) == [row for row in expected if row[0] >= prefix + b"/b"]
    index.close()
