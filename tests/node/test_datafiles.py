"""`penstock repair` and the files beside the log: what it finds, what it mends, and what it leaves alone."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.repair_log import repair_log
from penstock.node.datafiles import check_files, refuse_foreign
from penstock.node.errors import ConfigError
from penstock.pop.core.handle import SECRET_BYTES, load_secret
from penstock.store.snapshots.snapshotreader import snapshot_path
from penstock.store.snapshots.snapshotwriter import SnapshotWriter
from penstock.store.store import Store
from tests.store.wiring import close, open_store, publish


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with a log, a secret and a snapshot at position 0."""
    store = open_store(tmp_path / "data")
    publish(store, "plant/1", "kept")
    store.commit()
    take_snapshot(store)
    close(store)
    load_secret(tmp_path / "data")
    return tmp_path / "data"


def take_snapshot(store: Store) -> None:
    writer = SnapshotWriter(store.data_dir, store.index, 0, 1)
    for _ in writer.slices():
        pass
    writer.finish()
    writer.close()


def run(data_dir: Path, *, dry_run: bool) -> tuple[bool, dict[str, dict[str, object]]]:
    """Run the command; return whether damage remains, and what it says of each file."""
    out = io.StringIO()
    remains = repair_log(data_dir, dry_run=dry_run, as_json=True, out=out)
    return remains, {row["file"]: row for row in json.loads(out.getvalue())["files"]}


def text(data_dir: Path, *, dry_run: bool) -> str:
    out = io.StringIO()
    repair_log(data_dir, dry_run=dry_run, as_json=False, out=out)
    return out.getvalue()


def shorten(name: str, size: int) -> Callable[[Path], None]:
    return lambda data_dir: os.truncate(data_dir / name, size)


def flip(name: str, at: int) -> Callable[[Path], None]:
    def change(data_dir: Path) -> None:
        data = bytearray((data_dir / name).read_bytes())
        data[at] ^= 1
        (data_dir / name).write_bytes(data)

    return change


SNAPSHOT = f"snapshots/{0:020d}.snap"


def test_a_whole_directory_has_no_problem(data_dir: Path) -> None:
    assert check_files(data_dir) == []
    assert text(data_dir, dry_run=True) == "There is no damage.\n"


@pytest.mark.parametrize(
    ("harm", "file", "problem"),
    [
        (shorten("secret", 31), "secret", "has 31 bytes, but should have 32"),
        (shorten("secret", 0), "secret", "has 0 bytes, but should have 32"),
        (shorten(SNAPSHOT, 100), SNAPSHOT, "can't be used"),
        (shorten(SNAPSHOT, 0), SNAPSHOT, "can't be used"),
        (lambda data_dir: (data_dir / "bans.json").write_text('[{"kind":'), "bans.json", "can't be read"),
        (flip(SNAPSHOT, 40), SNAPSHOT, "can't be used"),
        (lambda data_dir: (data_dir / "snapshots" / "copy.snap").write_bytes(b""), "snapshots/copy.snap", "is no snapshot"),
    ],
)
def test_damage_is_reported_by_a_dry_run_and_mended_once(
    data_dir: Path, harm: Callable[[Path], object], file: str, problem: str
) -> None:
    harm(data_dir)
    harmed = (data_dir / file).read_bytes()
    remains, found = run(data_dir, dry_run=True)
    assert remains
    assert list(found) == [file]
    assert problem in str(found[file]["problem"])
    assert "`penstock repair`" in str(found[file]["effect"])
    assert (data_dir / file).read_bytes() == harmed, "a dry run changes nothing"
    remains, found = run(data_dir, dry_run=False)
    assert not remains
    assert (data_dir / str(found[file]["moved_to"])).read_bytes() == harmed
    assert run(data_dir, dry_run=True) == (False, {})


def test_a_new_secret_is_announced_and_used(data_dir: Path) -> None:
    before = load_secret(data_dir)
    os.truncate(data_dir / "secret", 7)
    with pytest.raises(ValueError, match=r"must have 32 bytes, not 7.*penstock repair"):
        load_secret(data_dir)
    said = text(data_dir, dry_run=True)
    assert "from a backup" in said
    assert "all handles that are out become void" in said
    said = text(data_dir, dry_run=False)
    assert "It is in damaged/secret-1 now." in said
    assert "all handles that are out become void" in said
    after = load_secret(data_dir)
    assert len(after) == SECRET_BYTES
    assert after != before
    assert (data_dir / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("harm", "file", "problem"),
    [
        (lambda data_dir: (data_dir / "secret").unlink(), "secret", "is missing"),
        (shorten("synced", 10), "synced", "can't be used: it has 10 bytes"),
        (lambda data_dir: (data_dir / "last_backup").write_text("{}"), "last_backup", "can't be used: completed_ms is None"),
        (lambda data_dir: (data_dir / "snapshots" / "1.partial").touch(), "snapshots/1.partial", "is half written"),
        (lambda data_dir: (data_dir / "commitlog" / "1.fresh").touch(), "commitlog/1.fresh", "is half written"),
        (lambda data_dir: (data_dir / "commitlog" / "notes").touch(), "commitlog/notes", "is unknown"),
        (lambda data_dir: (data_dir / "core.123").touch(), "core.123", "is unknown"),
        (lambda data_dir: (data_dir / "index.damaged").touch(), "index.damaged", "says that the index is damaged"),
    ],
)
def test_what_needs_no_mending_is_named_and_left_alone(
    data_dir: Path, harm: Callable[[Path], object], file: str, problem: str
) -> None:
    harm(data_dir)
    before = sorted(path.relative_to(data_dir) for path in data_dir.rglob("*") if "index/" not in str(path))
    for dry_run in (True, False):
        remains, found = run(data_dir, dry_run=dry_run)
        assert not remains
        assert problem in str(found[file]["problem"])
        assert found[file]["effect"]
        assert found[file]["moved_to"] is None
    after = sorted(path.relative_to(data_dir) for path in data_dir.rglob("*") if "index/" not in str(path))
    assert {*after} - {*before} <= {Path("lock")}


def test_files_that_are_being_replaced_are_known(data_dir: Path) -> None:
    for name in ("secret.new", "synced.new", "ballast", "lock", "control.sock"):
        (data_dir / name).touch()
    assert check_files(data_dir) == []
    assert snapshot_path(data_dir, 0).exists()


# --- a directory of somebody else -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ([], ""),
        (["lost+found"], ""),
        (["commitlog", "notes.txt"], ""),
        (["passwords"], ""),
        (["notes.txt"], "notes.txt"),
        (["lost+found", "notes.txt"], "notes.txt"),
        (["a", "b", "c", "d"], "a, b, c ..."),
    ],
)
def test_a_directory_with_files_of_somebody_else_is_no_data_directory(tmp_path: Path, names: list[str], refused: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    if refused:
        with pytest.raises(ConfigError, match=rf"not of a node \({refused}\).*--data-dir"):
            refuse_foreign(tmp_path, [tmp_path / "passwords"])
    else:
        refuse_foreign(tmp_path, [tmp_path / "passwords"])


def test_a_missing_directory_is_nobodys(tmp_path: Path) -> None:
    refuse_foreign(tmp_path / "new")
