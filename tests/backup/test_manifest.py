"""The manifest of a backup."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backup import manifest
from penstock.backup.errors import BackupInvalid
from penstock.backup.manifest import FILE, Manifest, StoredFile, decode_manifest, encode_manifest, load_manifest, save_manifest
from penstock.store.files import SYSTEM_FILES

FILES = st.builds(
    StoredFile,
    path=st.text(max_size=20),
    stored=st.text(max_size=20),
    size=st.integers(0, 2**63),
    crc32=st.integers(0, 2**32 - 1),
    inode=st.integers(0, 2**63),
    mtime_ns=st.integers(0, 2**63),
)
MANIFESTS = st.builds(
    Manifest,
    node_version=st.text(max_size=20),
    created_ms=st.integers(0, 2**50),
    data_dir=st.text(max_size=20),
    identity=st.text(max_size=20),
    round=st.integers(1, 10**8 - 1),
    start=st.integers(0, 2**63),
    durable=st.integers(0, 2**63),
    files=st.lists(FILES, max_size=3).map(tuple),
)
SIMPLE = Manifest("0.1", 1, "/data", "abc", 1, 0, 100, (StoredFile("secret", "00000001/secret", 32, 7, 0, 0),))

PATH = Path("backup.json")


@given(saved=MANIFESTS)
def test_a_manifest_is_read_as_it_was_saved(saved: Manifest) -> None:
    assert decode_manifest(encode_manifest(saved), PATH) == saved


def test_every_changed_byte_of_a_manifest_is_found() -> None:
    good = encode_manifest(SIMPLE)
    for at in range(len(good)):
        for changed in {good[at] ^ 0x01, good[at] ^ 0x80, ord(" ")} - {good[at]}:
            with pytest.raises(BackupInvalid, match="its checksum does not match"):
                decode_manifest(good[:at] + bytes([changed]) + good[at + 1 :], PATH)
        with pytest.raises(BackupInvalid, match="its checksum does not match"):
            decode_manifest(good[:at], PATH)


def test_a_directory_without_a_manifest_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(BackupInvalid, match=r"is no backup, since it has no backup\.json"):
        load_manifest(tmp_path, SYSTEM_FILES)


def test_a_manifest_of_another_version_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", 9)
    later = encode_manifest(SIMPLE)
    monkeypatch.undo()
    with pytest.raises(BackupInvalid, match=r"has version 9, but this Penstock reads version 1; use the Penstock .*: 0\.1"):
        decode_manifest(later, PATH)


def test_the_manifest_is_json(tmp_path: Path) -> None:
    save_manifest(tmp_path, SIMPLE, SYSTEM_FILES)
    assert orjson.loads((tmp_path / FILE).read_bytes())["backup"]["durable"] == 100
    assert load_manifest(tmp_path, SYSTEM_FILES) == SIMPLE
