"""Bans by user, client id and address, with an end, over restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.access.bans import FILE, Bans, read_bans
from penstock.access.errors import AccessInvalid
from penstock.access.subject import Subject
from penstock.store import files
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
        ("address", "10.0.0.0/8", Subject(address="a00::1"), False),
        ("address", "::ffff:10.0.0.0/104", Subject(address="10.9.9.9"), True),
        ("address", "::ffff:10.0.0.7/128", Subject(address="10.0.0.7"), True),
        ("address", "::ffff:0:0/80", Subject(address="10.0.0.7"), False),
        ("address", "0.0.0.0/0", Subject(address="11.9.9.9"), True),
        ("address", "fd00::/8", Subject(address="fd00::1"), True),
        ("address", "fd00::/8", Subject(address="fe80::1"), False),
    ],
)
async def test_a_ban_concerns_whom_it_names(
    tmp_path: Path, clock: ManualClock, kind: str, name: str, subject: Subject, applies: bool
) -> None:
    made = bans(tmp_path, clock)
    made.add(kind, name)  # type: ignore[arg-type]
    await made.save()
    assert (bans(tmp_path, clock).of(subject) is not None) is applies


async def test_a_ban_ends_by_itself(tmp_path: Path, clock: ManualClock) -> None:
    found = bans(tmp_path, clock)
    found.add("user", "ann", for_ms=1000, why="too loud")
    clock.advance(999)
    assert found.of(Subject("ann")) is not None
    assert [ban.why for _, ban in found.at_or_after("", 10)] == ["too loud"]
    assert len(found) == 1
    clock.advance(1)
    assert found.of(Subject("ann")) is None
    assert len(found) == 0
    found.add("user", "bob")
    await found.save()
    assert b"ann" not in (tmp_path / FILE).read_bytes()


def test_networks_of_ipv4_inside_ipv6_from_earlier_versions_hold(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / FILE).write_text('[{"kind": "address", "name": "::ffff:a00:0/104", "since_ms": 0}]')
    found = bans(tmp_path, clock)
    assert found.of_address("10.1.1.1") is not None
    found.lift("address", "::ffff:a00:0/104")
    assert len(found) == 0


async def test_a_ban_is_lifted(tmp_path: Path, clock: ManualClock) -> None:
    found = bans(tmp_path, clock)
    found.add("address", "10.1.2.3/8")
    await found.save()
    found.lift("address", "10.0.0.0/8")
    await found.save()
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


async def test_a_network_is_found_among_others_that_have_ended_or_were_lifted(tmp_path: Path, clock: ManualClock) -> None:
    found = bans(tmp_path, clock)
    for name, for_ms in (("10.0.0.0/8", 0), ("10.1.0.0/16", 1000), ("10.1.1.0/24", 0)):
        found.add("address", name, for_ms=for_ms)
    found.lift("address", "10.1.1.0/24")
    clock.advance(1000)
    ban = found.of_address("10.1.1.1")
    assert ban is not None
    assert ban.name == "10.0.0.0/8"
    found.lift("address", "10.0.0.0/8")
    assert found.of_address("10.1.1.1") is None


async def test_changes_at_once_are_all_in_the_file_with_one_write_for_those_that_wait(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bans(tmp_path, clock)
    writes = []

    def replace_file(*arguments: Any, **options: Any) -> None:
        writes.append(arguments)
        files.replace_file(*arguments, **options)

    monkeypatch.setattr("penstock.access.bans.replace_file", replace_file)
    monkeypatch.setattr("penstock.access.bans.ENCODED_AT_ONCE", 3)

    async def add(number: int) -> None:
        found.add("user", f"u{number}")
        await found.save()

    await asyncio.gather(*(add(number) for number in range(10)))
    assert 1 <= len(writes) <= 2
    assert {ban.name for ban in read_bans(tmp_path / FILE)} == {f"u{number}" for number in range(10)}
    await found.save()
    assert len(writes) <= 2, "nothing has changed"


async def test_a_ban_that_can_t_be_saved_is_saved_with_the_next_one(tmp_path: Path, clock: ManualClock) -> None:
    found = bans(tmp_path, clock)
    found.add("user", "ann")
    (tmp_path / f"{FILE}.new").mkdir()
    with pytest.raises(OSError, match="directory"):
        await found.save()
    (tmp_path / f"{FILE}.new").rmdir()
    await found.save()
    assert [ban.name for ban in read_bans(tmp_path / FILE)] == ["ann"]


def test_there_is_a_limit_and_bans_that_have_ended_make_room(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.access.bans.BANS_MAX", 2)
    found = bans(tmp_path, clock)
    found.add("user", "ann", for_ms=1000)
    found.add("user", "bob")
    found.add("user", "bob", why="another note")
    with pytest.raises(AccessInvalid, match="2 bans, which is the limit"):
        found.add("user", "eve")
    clock.advance(1000)
    found.add("user", "eve")
    assert [key for key, _ in found.at_or_after("", 10)] == ["user/bob", "user/eve"]
