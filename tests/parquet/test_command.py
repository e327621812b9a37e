"""`penstock tables`, and the lines of the guide that read what it writes."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="the tables need the extra `tables`")

from penstock.cli.main import main
from penstock.node.datafiles import check_files
from penstock.spark.parquet.schema import TABLES
from tests.parquet.sealing import STORE, seal
from tests.pop.wiring import Parts


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a log of two sealed segments in `penstock-data`."""
    parts = Parts(tmp_path / "penstock-data", store=STORE)
    parts.create()
    parts.publish(b"1", b"2")
    (popped,) = parts.pop(1)
    seal(parts)
    parts.ack(popped.handle)
    seal(parts)
    parts.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_lists_and_verifies(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "list"]) == 0
    assert "penstock-data/tables has no tables." in capsys.readouterr().out
    assert main(["tables", "verify"]) == 0
    assert "2 sealed segments, from position 0 to " in capsys.readouterr().out
    assert main(["tables", "backfill"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Segment 0 to \d+: \d+ messages, 1 deliveries, 0 ends, 0 damages, 1 settings, 1 open\.", first)
    assert re.fullmatch(r"Segment \d+ to \d+: \d+ messages, 0 deliveries, 1 ends, 0 damages, 0 settings, 0 open\.", second)
    assert main(["tables", "backfill"]) == 0
    assert capsys.readouterr().out == "penstock-data/tables has all sealed segments of the log.\n"
    assert main(["tables", "compact"]) == 0
    assert capsys.readouterr().out == "penstock-data/tables has no small files of a day that is over.\n"
    assert main(["tables", "list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["table"] for row in rows] == [table.name for table in TABLES]
    assert {row["files"] for row in rows} == {2}
    assert [row["rows"] for row in rows[1:]] == [1, 1, 0, 1, 1]
    assert main(["tables", "verify"]) == 0
    assert capsys.readouterr().out == "2 segments compared: the tables have what the log has.\n"


def test_a_verification_that_finds_something_fails(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "backfill", "--json"]) == 0
    next(Path("penstock-data/tables/ends").rglob("0000*.parquet")).unlink()
    capsys.readouterr()
    assert main(["tables", "verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["segments_compared"], found["segments_unwritten"]) == (False, 2, 0)
    assert re.fullmatch(r"ends has no file for the positions from \d+ to \d+\.", found["problems"][0])


def test_only_the_owner_can_read_the_tables_and_a_repair_knows_them(directory: Path) -> None:
    assert main(["tables", "backfill"]) == 0
    data_dir = directory / "penstock-data"
    paths = [data_dir / "tables", *(data_dir / "tables").rglob("*")]
    assert {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths} == {(True, 0o700), (False, 0o600)}
    assert [problem.file for problem in check_files(data_dir) if problem.file == "tables"] == []


@pytest.mark.parametrize("action", ["backfill", "verify"])
def test_a_directory_without_a_log_is_one_line(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", action, "--data-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"penstock tables: {tmp_path} holds no CommitLog.")
