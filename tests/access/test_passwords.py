"""The password file: users are added, changed, deleted and verified, and damage says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from argon2 import PasswordHasher, extract_parameters

from penstock.access import passwords
from penstock.access.errors import AccessInvalid
from penstock.access.passwords import PASSWORD_BYTES_MAX, PasswordFile


def users(tmp_path: Path, text: str = "") -> PasswordFile:
    path = tmp_path / "passwords"
    path.write_text(text)
    return PasswordFile(path)


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new hash take 64 KiB and one pass, because each takes a fifth of a second otherwise."""

    def cheap(time_cost: int = 1, memory_kib: int = 64, parallelism: int = 1) -> PasswordHasher:
        return PasswordHasher(time_cost, memory_kib, parallelism)

    monkeypatch.setattr(passwords, "PasswordHasher", cheap)


def test_a_user_is_added_changed_and_deleted(tmp_path: Path) -> None:
    found = users(tmp_path, "# ours\n\n")
    found.add("ann", "first")
    found.add("bob", "other")
    path = tmp_path / "passwords"
    assert path.stat().st_mode & 0o777 == 0o600
    assert PasswordFile(path).verify("ann", b"first")
    PasswordFile(path).change("ann", "second")
    again = PasswordFile(path)
    assert [again.verify("ann", given) for given in (b"first", b"second")] == [False, True]
    assert "first" not in path.read_text()
    again.delete("ann")
    assert list(PasswordFile(path).hashes) == ["bob"]
    assert path.read_text().startswith("# ours\n\nbob:$argon2id$")


def test_a_wrong_password_and_an_unknown_user_are_refused(tmp_path: Path) -> None:
    found = users(tmp_path)
    found.add("ann", "right")
    found = PasswordFile(tmp_path / "passwords")
    assert not found.verify("ann", b"wrong")
    assert not found.verify("eve", b"right")
    assert not found.verify("ann", b"x" * (PASSWORD_BYTES_MAX + 1))


def test_an_unknown_user_costs_what_one_of_the_known_ones_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"quick": 64, "slow": 256, "slower": 512}
    hashes = {name: PasswordHasher(1, memory, 1).hash("right") for name, memory in costs.items()}
    damaged = "damaged:$argon2id$v=19$m=8,t=1,p=1$damaged\n"
    found = users(tmp_path, damaged + "".join(f"{name}:{stated}\n" for name, stated in hashes.items()))
    compared: list[str] = []
    verify = PasswordHasher.verify

    def noted(self: PasswordHasher, stated: str, password: bytes) -> bool:
        compared.append(stated)
        return verify(self, stated, password)

    monkeypatch.setattr(PasswordHasher, "verify", noted)
    asked = [f"unknown-{number}" for number in range(30)]
    assert not any(found.verify(name, b"right") for name in asked + asked)
    assert set(compared) == set(hashes.values())
    assert compared[:30] == compared[30:], "a name costs the same each time"
    again = PasswordFile(tmp_path / "passwords")
    assert not again.verify(asked[0], b"wrong")
    assert compared[-1] == compared[0], "and after a restart"


@pytest.mark.parametrize("name", ["", " ann", "a:b", "#a", "a\nb", "x" * 256])
def test_a_name_that_would_break_the_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AccessInvalid, match="user name"):
        users(tmp_path).add(name, "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ann", "line 1: write NAME:HASH"),
        ("\nann:secret", "line 2: write NAME:HASH"),
        (":$argon2id$x", "line 1"),
        ("ann:$argon2id$x\nann:$argon2id$y", "line 2: the user 'ann' was there"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(AccessInvalid, match=reason) as raised:
        users(tmp_path, text)
    assert "secret" not in str(raised.value)


def test_a_damaged_hash_is_no_wrong_password(tmp_path: Path) -> None:
    with pytest.raises(AccessInvalid, match="damaged hash"):
        users(tmp_path, "ann:$argon2id$nonsense").verify("ann", b"x")


def test_what_can_t_be_is_refused(tmp_path: Path) -> None:
    found = users(tmp_path)
    found.add("ann", "x")
    found = PasswordFile(tmp_path / "passwords")
    with pytest.raises(AccessInvalid, match="exists"):
        found.add("ann", "y")
    with pytest.raises(AccessInvalid, match="no user 'bob'"):
        found.delete("bob")
    with pytest.raises(AccessInvalid, match="empty"):
        found.change("ann", "")
    with pytest.raises(AccessInvalid, match="make it with `penstock user add NAME --file "):
        PasswordFile(tmp_path / "none")
    with pytest.raises(AccessInvalid, match="can't be read"):
        PasswordFile(tmp_path)


@pytest.mark.parametrize("lanes", [1, 4])
def test_an_unknown_user_costs_the_hash_that_others_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    hashed = PasswordHasher(time_cost=2, memory_cost=128, parallelism=lanes).hash("right")
    found = users(tmp_path, f"ann:{hashed}\n")
    asked: list[str] = []
    verify = PasswordHasher.verify

    def note(hasher: PasswordHasher, known: str, password: bytes) -> bool:
        asked.append(known)
        return verify(hasher, known, password)

    monkeypatch.setattr(PasswordHasher, "verify", note)
    assert not found.verify("eve", b"right")
    assert found.verify("ann", b"right")
    assert extract_parameters(asked[0]) == extract_parameters(hashed)


def test_a_new_hash_takes_one_thread(tmp_path: Path) -> None:
    found = users(tmp_path)
    found.add("ann", "right")
    assert extract_parameters(PasswordFile(tmp_path / "passwords").hashes["ann"]).parallelism == 1
