"""The audit log: a line for each event, within a rate, readable whatever clients put into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.access.audit import Audit
from penstock.access.subject import Subject
from tests.clock import ManualClock


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_names_the_user_and_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(str(path), 10, ManualClock().now_ms)
    audit.note(
        "denied", Subject("ann", client_id="c\u202e\x1b[2J\udc80", address="10.0.0.1"), action="publish", topic="a" * 999, x=""
    )
    (line,) = lines(path)
    assert line.pop("at").endswith("Z")
    assert len(line.pop("topic")) == 300
    assert line == {
        "event": "denied",
        "user": "ann",
        "client": "c\\u202e\\u001b[2J\\udc80",
        "address": "10.0.0.1",
        "action": "publish",
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_flood_is_counted_and_other_events_are_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(str(path), 2, ManualClock().now_ms)
    for _ in range(5):
        audit.note("refused", Subject("eve"))
    audit.note("changed", Subject("operator"), what="ban")
    audit.turn_page()
    audit.note("refused", Subject("eve"))
    assert [line["event"] for line in lines(path)] == ["refused", "refused", "changed", "left_out", "refused"]
    assert lines(path)[3]["lines"] == 3


def test_a_flood_of_one_kind_leaves_a_tenth_of_the_rate_to_each_other_kind(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(str(path), 20, ManualClock().now_ms)
    for kind, count in (("publish", 1000), ("pop", 5), ("admin", 1)):
        for _ in range(count):
            audit.note("denied", Subject("eve"), action=kind)
    assert [line["action"] for line in lines(path)] == ["publish"] * 20 + ["pop"] * 2 + ["admin"]
    audit.close()
    assert [(line["of"], line["action"], line["lines"]) for line in lines(path)[23:]] == [
        ("denied", "publish", 980),
        ("denied", "pop", 3),
    ]
    assert audit.counts == {"denied": 1006}


def test_a_file_that_was_renamed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(str(path), 2, ManualClock().now_ms)
    path.rename(tmp_path / "old")
    audit.reopen()
    audit.note("connected", Subject("ann"))
    assert len(lines(path)) == 1
    audit.close()
    audit.note("connected", Subject("ann"))


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    audit = Audit("/dev/full", 9, ManualClock().now_ms)
    audit.note("connected", Subject("ann"))
    audit.note("connected", Subject("ann"))
    assert audit.lost == 2
