"""Bans by user, client id and address, with an end, over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.access.bans import FILE, Bans
from penstock.access.errors import AccessInvalid
from penstock.access.subject import Subject
from tests.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def bans(tmp_path: Path, clock: ManualClock) -> Bans:
    return Bans(tmp_path, clock.now_ms)


@pytest.mark.parametrize(
    ("kind", "name", "subject", "applies"),
    [
        ("user", "ann", Subject("ann"), True),
        ("user", "ann", Subject("anna", client_id="ann"), False),
        ("client", "c1", Subject("", client_id="c1"), True),
        ("address", "10.0.0.7", Subject(address="10.0.0.7"), True),
        ("address", "10.0.0.0/8", Subject(address="10.9.9.9"), True),
        ("address", "10.0.0.0/8", Subject(address="11.9.9.9"), False),
        ("address", "10.0.0.0/8", Subject(address=""), False),
        ("address", "fd00::/8", Subject(address="fd00::1"), True),
    ],
)
def test_a_ban_concerns_whom_it_names(
    tmp_path: Path, clock: ManualClock, kind: str, name: str, subject: Subject, applies: bool
) -> None:
    made = bans(tmp_path, clock)
    made.add(kind, name)  # type: ignore[arg-type]
    made.save()
    assert (bans(tmp_path, clock).of(subject) is not None) is applies


def test_a_ban_ends_by_itself(tmp_path: Path, clock: ManualClock) -> None:
    found = bans(tmp_path, clock)
    found.add("user", "ann", for_ms=1000, why="too loud")
    clock.advance(999)
    assert found.of(Subject("ann")) is not None
    assert [ban.why for ban in found] == ["too loud"]
    clock.advance(1)
    assert found.of(Subject("ann")) is None
    assert list(found) == []
    found.add("user", "bob")
    found.save()
    assert b"ann" not in (tmp_path / FILE).read_bytes()


def test_a_ban_is_lifted(tmp_path: Path, clock: ManualClock) -> None:
    found = bans(tmp_path, clock)
    found.add("address", "10.1.2.3/8")
    found.save()
    found.lift("address", "10.0.0.0/8")
    found.save()
    assert bans(tmp_path, clock).of_address("10.1.1.1") is None
    with pytest.raises(AccessInvalid, match="no ban of the user"):
        found.lift("user", "ann")
    with pytest.raises(AccessInvalid, match="no address"):
        found.add("address", "home")


@pytest.mark.parametrize("data", ["{", "[1]", '[{"kind": "x", "name": "a", "since_ms": 0}]', '[{"kind": "user", "name": 1}]'])
def test_a_damaged_file_says_so(tmp_path: Path, clock: ManualClock, data: str) -> None:
    (tmp_path / FILE).write_text(data)
    with pytest.raises(AccessInvalid, match="delete it to lift all bans"):
        bans(tmp_path, clock)
